"""GRPO steps with vLLM as the sampler on a random checkpoint: cost of a sync, mismatch, speed, memory.

    python -m qerl.bench.vllm_steps OUT.json --size 7B --weights nvfp4 --weights bf16

Nothing is downloaded. What is measured doesn't depend on what the policy says; so that there is something to learn
from, completions are cut at random lengths and long ones are punished.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from qerl.data.arithmetic import generate
from qerl.data.records import Problem, parse_record
from qerl.host.profiling import reset_peak_memory, seconds
from qerl.host.progress import configure_logging, log
from qerl.policy.policy import weight_bytes
from qerl.provenance.files import write_json
from qerl.provenance.stamp import stamp
from qerl.random_models.checkpoint import write_checkpoint
from qerl.rl.checkpoint import Checkpoints
from qerl.rl.rollouts import Collector, Task
from qerl.rl.train import make_policy
from qerl.rl.trainer import Trainer
from qerl.rollout.sampler import Completion, SamplingParams
from qerl.rollout.vllm.in_process import VllmSampler
from qerl.settings.base import parse
from qerl.settings.data import Generated
from qerl.settings.run import RunSettings


@dataclass
class _Cut:
    """The sampler under measurement; of each completion a random part is kept."""

    sampler: VllmSampler
    syncs: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.served = self.sampler.served

    def sync(self) -> None:
        self.sampler.sync()
        self.syncs.append(self.sampler.last_sync.seconds)

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Completion]]:
        with seconds() as elapsed:
            groups = self.sampler.generate(prompts, params)
        self.rates.append(sum(len(c.token_ids) for group in groups for c in group) / elapsed.value)
        lengths = random.Random(params.seed)
        return [[_cut(c, lengths.randint(params.max_tokens // 2, params.max_tokens)) for c in g] for g in groups]


def _cut(completion: Completion, length: int) -> Completion:
    return Completion(completion.token_ids[:length], completion.logprobs[:length], completion.finished)


def _settings(weights: str, values: dict[str, Any], vllm: dict[str, Any]) -> RunSettings:
    rollout = {
        "engine": "vllm",
        "vllm": {"max_model_len": 256 + values["max_tokens"], **vllm},
        "prompts": values["prompts"],
        "group_size": values["group_size"],
        "sampling": {"max_tokens": values["max_tokens"]},
    }
    run = {
        "model": values["size"],
        "dataset": "generated",
        "weights": weights,
        "dtype": "bfloat16",
        "adapter": {"rank": values["rank"], "alpha": 2 * values["rank"]},
        # The same noise in sampler and trainer: what differs is the engines' arithmetic alone.
        "noise": {"schedule": "constant", "mode": "consistent"},
        "rollout": rollout,
        "reward": {"overlong_buffer": values["max_tokens"] - 1},
        "optimizer": {"learning_rate": 1e-3, "warmup_ratio": 0.0},
        "steps": values["steps"],
        "micro_batch_tokens": 4096,
    }
    return parse(RunSettings, run, "vllm_steps")


def _problems() -> list[Problem]:
    records = generate("gsm8k", Generated(train=256, validation=1, test=1))["train"]
    return [parse_record(record, "gsm8k", "generated") for record in records]


def _measure(settings: RunSettings, checkpoint: Path, problems: list[Problem], work: Path) -> dict[str, Any]:
    reset_peak_memory()
    policy = make_policy(settings, checkpoint)
    with seconds() as start:
        sampler = VllmSampler(policy, settings.rollout.vllm)
    cut = _Cut(sampler)
    collector = Collector(settings, policy, cut, Task(problems, "gsm8k", ""))
    rows = Trainer(settings, policy, collector, Checkpoints(work, "bench"), work / "metrics.jsonl").run()
    for _ in range(10):
        cut.sync()
    report = {
        "weights": settings.weights,
        "served": sampler.weights,
        "kernel": sampler.kernel,
        "engine_start_seconds": start.value,
        "sync_seconds": cut.syncs,
        "sync_bytes": sampler.last_sync.bytes,
        "sync_checksum": sampler.last_sync.checksum,
        "rollout_tokens_per_second": cut.rates,
        "trainer_weight_bytes": weight_bytes(policy),
        "steps": rows,
        "peak_memory_bytes": max(row["memory_bytes"] for row in rows),
    }
    sampler.close()
    return report


def main(
    out: Path,
    size: str = "7B",
    weights: Annotated[list[str] | None, typer.Option()] = None,
    steps: int = 4,
    prompts: int = 8,
    group_size: int = 8,
    max_tokens: int = 512,
    rank: int = 16,
    utilization: float = 0.5,
    kv_cache_gib: Annotated[float | None, typer.Option()] = None,
    sleep: bool = False,
    eager: bool = False,
) -> None:
    """Measure each of `weights` (nvfp4 and bf16 by default) in turn and write OUT."""
    values = {key: value for key, value in locals().items() if key not in ("out", "weights")}
    vllm = {key: values.pop(key) for key in ("utilization", "kv_cache_gib", "sleep", "eager")}
    problems, points = _problems(), []
    for weights_format in weights or ["nvfp4", "bf16"]:
        with TemporaryDirectory() as work:
            checkpoint = Path(work) / "model"
            write_checkpoint(checkpoint, size, weights_format, [problem.question for problem in problems])
            settings = _settings(weights_format, values, vllm)
            points.append(_measure(settings, checkpoint, problems, Path(work)))
            log.info("%s: %s", weights_format, {k: v for k, v in points[-1].items() if k != "steps"})
        gc.collect()
        torch.cuda.empty_cache()
    write_json(out, {"bench": "vllm_steps", "settings": values | vllm, "points": points, "provenance": stamp()})


if __name__ == "__main__":
    configure_logging()
    typer.run(main)
