"""Rollouts of mixed lengths by the project's own samplers: the engine on a GPU, the eager sampler on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qerl.bench.rollout_mix.workload import MixEngine, Workload, measure
from qerl.jobs.shapes import Mix, RolloutMixJob
from qerl.policy.policy import choose_device
from qerl.random_models.policy import random_policy
from qerl.results.schema.speed import DecodeSeconds, DraftsFound, DraftsVerified, PhaseSeconds, TraceRow
from qerl.rollout.engine.drafts import EarlierCompletions
from qerl.rollout.engine.engine import EngineSampler
from qerl.rollout.engine.phases import DecodeTime, RolloutPhases
from qerl.rollout.engine.speculation import DraftCounts
from qerl.rollout.factory import make_sampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.rollout import EngineSettings, NativeSettings


def _start(work: Mix, workload: Workload) -> MixEngine:
    policy = random_policy(work.size, work.weights, work.rank, choose_device())
    settings = EngineSettings(native=NativeSettings(drafts=work.drafts))
    sampler = make_sampler(policy, settings, work.sequences)
    free = SamplingParams(
        max_tokens=work.longest,
        count=work.group,
        ignore_eos=True,
        lengths=tuple(map(tuple, workload.completion_tokens)),
        replay=_replay(workload.trace) if workload.trace else None,
    )

    def rollout(prompts: list[list[int]], round_: int) -> list[list[int]]:
        if isinstance(sampler, EngineSampler):
            sampler.earlier = EarlierCompletions()  # a trace's completions are those of the round before
        groups = sampler.generate(prompts, replace(free, seed=round_))
        return [[len(completion.token_ids) for completion in group] for group in groups]

    def phases() -> PhaseSeconds | None:
        return _stored(sampler.phases) if isinstance(sampler, EngineSampler) else None

    def drafts() -> DraftsVerified | None:
        counts = sampler.drafts if isinstance(sampler, EngineSampler) else None
        return _stored_drafts(counts) if counts and counts.steps else None

    return MixEngine(sampler.served, rollout, phases, drafts)


def _replay(trace: list[TraceRow]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(tuple(map(tuple, row.completions)) for row in trace)


def _stored(phases: RolloutPhases) -> PhaseSeconds:
    return PhaseSeconds(
        prefill=phases.prefill,
        prefills=phases.prefills,
        decode=_stored_steps(phases.decode),
        verify=tuple(_stored_steps(phases.verify)),
        between=phases.between,
        host_wait=phases.host_wait,
    )


def _stored_steps(times: Mapping[int, DecodeTime]) -> list[DecodeSeconds]:
    return [
        DecodeSeconds(batch=batch, steps=one.steps, sequences=one.sequences / one.steps, seconds=one.seconds)
        for batch, one in sorted(times.items())
        if one.steps
    ]


def _stored_drafts(counts: DraftCounts) -> DraftsVerified:
    return DraftsVerified(
        steps=counts.steps,
        verifications=counts.sequences,
        rows_per_step=counts.rows / counts.steps,
        tokens_per_verification=counts.tokens / counts.sequences,
        sources=[
            DraftsFound(source=source.value, verified=count.verified, accepted=count.accepted)
            for source, count in sorted(counts.sources.items())
        ],
    )


def measure_mix(job: RolloutMixJob) -> None:
    """Time the rollouts and write the result."""
    measure(job, lambda workload: _start(job.work, workload))
