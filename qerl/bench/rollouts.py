"""Rollouts of the project's own samplers: of mixed lengths, and by weight format and LoRA rank (paper Table 9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from qerl.bench.timing import Point, run_points
from qerl.bench.workloads import Lengths, MixEngine, measure
from qerl.host.gpus import seconds
from qerl.jobs import PointJob, RolloutJob
from qerl.models.policy import Policy, choose_device, load_policy, weight_bytes, with_adapter
from qerl.models.random import random_policy
from qerl.results.schema import Provenance
from qerl.results.speeds import (
    DecodeSeconds,
    PhaseSeconds,
    RolloutBenchResult,
    RolloutPoint,
    TraceRow,
)
from qerl.results.store import write
from qerl.rollout.engine import EngineSampler, RolloutPhases
from qerl.rollout.factory import make_sampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.run import AdapterSettings, EngineSettings
from qerl.settings.workflow import RolloutBench
from qerl.settings.workloads import Mix

# Rollouts of mixed lengths by the project's own samplers: the engine on a GPU, the eager sampler on a CPU.


def _start(work: Mix, workload: Lengths) -> MixEngine:
    policy = random_policy(work.base, work.rank, choose_device())
    sampler = make_sampler(policy, EngineSettings(), work.sequences)
    free = SamplingParams(
        max_tokens=work.tokens,
        count=work.group_size,
        ignore_eos=True,
        lengths=tuple(map(tuple, workload.completion_tokens)),
        replay=_replay(workload.trace) if workload.trace else None,
    )

    def rollout(prompts: list[list[int]], round_: int) -> list[list[int]]:
        groups = sampler.generate(prompts, replace(free, seed=round_))
        return [[len(completion.token_ids) for completion in group] for group in groups]

    def phases() -> PhaseSeconds | None:
        return _stored(sampler.phases) if isinstance(sampler, EngineSampler) else None

    return MixEngine(sampler.served, rollout, phases)


def _replay(trace: list[TraceRow]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(tuple(map(tuple, row.completions)) for row in trace)


def _stored(phases: RolloutPhases) -> PhaseSeconds:
    return PhaseSeconds(
        prefill=phases.prefill,
        prefills=phases.prefills,
        decode=[
            DecodeSeconds(batch=batch, steps=one.steps, sequences=one.sequences / one.steps, seconds=one.seconds)
            for batch, one in sorted(phases.decode.items())
            if one.steps
        ],
        between=phases.between,
        host_wait=phases.host_wait,
    )


def measure_mix(job: PointJob[Mix, None]) -> None:
    """Time the rollouts and write the result."""
    for part in job.parts:
        measure(part.work, job.out / part.file, partial(_start, part.work))


# Rollout throughput by weight format and LoRA rank (paper Table 9).


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
