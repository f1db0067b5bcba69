"""Rollouts of mixed lengths by the project's own samplers: the engine on a GPU, the eager sampler on a CPU."""

from __future__ import annotations

from dataclasses import replace

from qerl.bench.rollout_mix.workload import MixEngine, Workload, measure
from qerl.jobs.shapes import Mix, RolloutMixJob
from qerl.policy.policy import choose_device
from qerl.random_models.policy import random_policy
from qerl.results.schema.speed import DecodeSeconds, PhaseSeconds, TraceRow
from qerl.rollout.engine.engine import EngineSampler
from qerl.rollout.engine.phases import RolloutPhases
from qerl.rollout.factory import make_sampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.rollout import EngineSettings


def _start(work: Mix, workload: Workload) -> MixEngine:
    policy = random_policy(work.size, work.weights, work.rank, choose_device())
    sampler = make_sampler(policy, EngineSettings(), work.sequences)
    free = SamplingParams(
        max_tokens=work.longest,
        count=work.group,
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
    decode = [
        DecodeSeconds(batch=batch, steps=one.steps, sequences=one.sequences / one.steps, seconds=one.seconds)
        for batch, one in sorted(phases.decode.items())
        if one.steps
    ]
    return PhaseSeconds(
        prefill=phases.prefill,
        prefills=phases.prefills,
        decode=decode,
        between=phases.between,
        host_wait=phases.host_wait,
    )


def measure_mix(job: RolloutMixJob) -> None:
    """Time the rollouts and write the result."""
    measure(job, lambda workload: _start(job.work, workload))
