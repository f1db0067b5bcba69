"""Rollout throughput by weight format and LoRA rank (paper Table 9)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from qerl.bench.timing import Point, run_points
from qerl.host.profiling import seconds
from qerl.jobs.profile import RolloutJob
from qerl.policy.policy import Policy, load_policy, weight_bytes, with_adapter
from qerl.results.files import write
from qerl.results.schema.profile import RolloutBenchResult, RolloutPoint
from qerl.results.schema.stored import Provenance
from qerl.rollout.factory import make_sampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.benches import RolloutBench
from qerl.settings.training import AdapterSettings


def _policy(checkpoint: Path, rank: int, settings: RolloutBench) -> Policy:
    if rank == 0:
        return load_policy(checkpoint, None, settings.dtype)
    policy = with_adapter(checkpoint, AdapterSettings(rank=rank), settings.dtype, settings.seed)
    for name, parameter in policy.trainable():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=1e-3)
    return policy


def _measure(checkpoint: Path, rank: int, settings: RolloutBench) -> Callable[[int], dict[str, Any]]:
    policy = _policy(checkpoint, rank, settings)
    sampler = make_sampler(policy, settings, settings.sequences)
    weights_bytes, served = weight_bytes(policy), sampler.served

    def once(round_: int) -> dict[str, Any]:
        numbers = np.random.default_rng([settings.seed, round_])
        shape = (settings.sequences, settings.prompt_tokens)
        prompts = numbers.integers(policy.lm.config.vocab_size, size=shape).tolist()
        # Throughput must not depend on when a policy stops.
        params = SamplingParams(max_tokens=settings.completion_tokens, seed=round_, ignore_eos=True)
        with seconds() as elapsed:
            sampler.generate(prompts, params)
        rate = settings.sequences * settings.completion_tokens / elapsed.value
        return {"rate": rate, "weight_bytes": weights_bytes, "sampler": served}

    return once


def bench_rollout(job: RolloutJob) -> None:
    """Time each weight format at each rank."""
    settings = job.settings
    points = [
        Point({"weights": w, "rank": r}, lambda w=w, r=r: _measure(job.checkpoints[w], r, settings))  # type: ignore[misc]
        for r in settings.ranks
        for w in settings.weights
    ]
    rows = [_row(point, settings) for point in run_points(points, settings.repeats, settings.interleave)]
    result = RolloutBenchResult(
        bench=job.bench,
        kind="rollout",
        model=settings.model,
        points=rows,
        provenance=Provenance.of_now(settings.seed),
    )
    write(job.out, result)


def _row(point: Point, settings: RolloutBench) -> RolloutPoint:
    return RolloutPoint(
        **point.label,
        sequences=settings.sequences,
        prompt_tokens=settings.prompt_tokens,
        completion_tokens=settings.completion_tokens,
        samples=[sample["rate"] for sample in point.samples],
        weight_bytes=point.samples[0]["weight_bytes"] if point.samples else None,
        sampler=point.samples[0]["sampler"] if point.samples else None,
        peak_memory_bytes=point.peak_memory_bytes or None,
        status=point.status,
    )
