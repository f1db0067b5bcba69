"""The names of metrics in trackers: TRL's where TRL logs the quantity, else verl's, else the project's own."""

from __future__ import annotations

from collections.abc import Mapping

#: The prefix under which transformers' trainers, and so TRL's, log the metrics of training.
PREFIX = "train/"
#: Bytes of a gigabyte, in which verl gives memory.
_GIGABYTE = 2**30

#: Names of TRL's GRPOTrainer, by the names of metrics.jsonl.
TRL = {
    "reward": "reward",
    "reward/std": "reward_std",
    "reward/equal_groups": "frac_reward_zero_std",
    "reward/correct": "rewards/correct/mean",
    "reward/format": "rewards/format/mean",
    "reward/overlong": "rewards/overlong/mean",
    "reward/custom": "rewards/custom/mean",
    "completion_length": "completions/mean_length",
    "truncated": "completions/clipped_ratio",
    "loss": "loss",
    "entropy": "entropy",
    "reference/kl": "kl",
    "clip_ratio/low": "clip_ratio/low_mean",
    "clip_ratio/high": "clip_ratio/high_mean",
    "mismatch/max_ratio": "sampling/importance_sampling_ratio/max",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "seconds/step": "step_time",
}
#: Names of verl, for quantities that TRL doesn't log.
VERL = {
    "mismatch/kl": "rollout_corr/kl",
    "value/mean": "critic/values/mean",
    "value/explained_variance": "critic/vf_explained_var",
    "value/loss": "critic/vf_loss",
    "value/clipped": "critic/vf_clipfrac",
    "seconds/rollout": "timing_s/gen",
    "seconds/update": "timing_s/update_actor",
    "seconds/sync": "timing_s/update_weights",
    "memory_bytes": "perf/max_memory_allocated_gb",
}
NAMES = {**TRL, **VERL}


def tracked(row: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step, a row of metrics.jsonl, under their names in trackers; memory is in GiB.

    A quantity that neither TRL nor verl logs keeps its name in metrics.jsonl.
    """
    named = {PREFIX + NAMES.get(key, key): value for key, value in row.items() if key != "step"}
    memory = PREFIX + NAMES["memory_bytes"]
    return {**named, memory: named[memory] / _GIGABYTE}
