"""Schemas of training's files: metrics.jsonl, one row per step, and run.json."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, PlainSerializer, model_validator

from qerl.results.schema.stored import OK, Number, Provenance, Quartiles, Stored, whole
from qerl.settings.run import RunSettings


def _named(name: str) -> Any:
    return Field(alias=name)


def _maybe(name: str) -> Any:
    return Field(None, alias=name)


class StepMetrics(Stored):
    """A line of train/<run>/metrics.jsonl; `value/` is of PPO, `reward/custom` of the user's own function.

    `entropy` is the trained policy's, `entropy/sampler` that of the policy that sampled, estimated by its completions.
    `grading/timeouts` counts completions whose comparison with the answer exceeded the grader's limits; a step without
    such completions lacks it.
    `silent/` is of completions without a gradient: their number, and the sample that stands for them in `entropy`,
    `mismatch/` and `ess/`. `seconds/idle` is of several processes: for how long a rank waited in the rollout for the
    others, as the mean of all ranks, and as the longest.
    """

    step: int
    problems: int
    reward: Number
    reward_std: Number = _named("reward/std")
    reward_correct: Number = _named("reward/correct")
    reward_format: Number = _named("reward/format")
    reward_overlong: Number = _named("reward/overlong")
    reward_custom: Number | None = _maybe("reward/custom")
    reward_equal_groups: Number = _named("reward/equal_groups")
    completion_tokens: Number
    completion_length: Number
    truncated: Number
    grading_timeouts: int | None = _maybe("grading/timeouts")
    loss: Number
    entropy: Number
    entropy_sampler: Number | None = _maybe("entropy/sampler")
    temperature: Number | None = None
    mismatch_kl: Number = _named("mismatch/kl")
    ess_tokens: Number | None = _maybe("ess/tokens")
    ess_sequences: Number | None = _maybe("ess/sequences")
    reference_kl: Number = _named("reference/kl")
    silent_completions: int | None = _maybe("silent/completions")
    silent_sampled: int | None = _maybe("silent/sampled")
    silent_entropy: Number | None = _maybe("silent/entropy")
    silent_mismatch_kl: Number | None = _maybe("silent/mismatch_kl")
    clip_ratio_low: Number = _named("clip_ratio/low")
    clip_ratio_high: Number = _named("clip_ratio/high")
    value_mean: Number | None = _maybe("value/mean")
    value_explained_variance: Number | None = _maybe("value/explained_variance")
    value_loss: Number | None = _maybe("value/loss")
    value_clipped: Number | None = _maybe("value/clipped")
    mismatch_max_ratio: Number = _named("mismatch/max_ratio")
    grad_norm: Number
    learning_rate: Number
    noise_sigma: Number = _named("noise/sigma")
    noise_norm: Number = _named("noise/norm")
    rollout_rate: Number = _named("tokens_per_second/rollout")
    update_rate: Number = _named("tokens_per_second/update")
    sync_seconds: Number = _named("seconds/sync")
    rollout_seconds: Number = _named("seconds/rollout")
    idle_seconds: Number | None = _maybe("seconds/idle")
    idle_seconds_max: Number | None = _maybe("seconds/idle_max")
    update_seconds: Number = _named("seconds/update")
    step_seconds: Number = _named("seconds/step")
    memory_bytes: Number


class StoredCompletion(Stored):
    """A completion of a stored rollout.

    `tokens` are the texts of its tokens, which together are the text that was graded. A token that ends within a
    character has an empty text. `logprobs` are the sampler's, and `entropies` those of the trained policy before the
    step's first update; both are in nats, at the sampling temperature. `extracted` is the answer that the grader read.
    `advantage` is None for ppo, where every token has its own.
    """

    tokens: list[str]
    logprobs: list[float]
    entropies: list[float]
    parts: dict[str, float]
    reward: float
    advantage: float | None
    extracted: str | None
    finished: bool


class RolloutRow(Stored):
    """A line of train/<run>/rollouts/step-<step>.jsonl.gz: a problem with completions of its group."""

    step: int
    problem: str
    prompt: str
    gold: str
    completions: list[StoredCompletion]


class RunSummary(Stored):
    """The cost of one training run.

    `seconds` are those of all its steps, and the peak is that of any attempt: a run that was killed has had several.
    """

    steps: int
    seconds: Number
    peak_memory_bytes: Number | None
    trainable_parameters: int
    weight_bytes: Number
    sampler: str = ""
    rollout_tokens_per_second: Number
    update_tokens_per_second: Number
    step_seconds: Quartiles


class RunResult(Stored):
    """train/<run>/run.json. A failed run has its error as `status`, its message as `reason`, and no summary."""

    run: str
    experiment: str
    arm: str
    varied: dict[str, Any]
    settings: Annotated[RunSettings, PlainSerializer(whole)]
    status: str = OK
    reason: str = ""
    summary: RunSummary | None = None
    provenance: Provenance

    @model_validator(mode="after")
    def _ok_has_a_summary(self) -> Self:
        if self.status == OK and self.summary is None:
            raise ValueError("a run with status ok needs a summary")
        return self
