"""This project's samplers on random weights of known shapes, and on the bases of a configuration (paper Table 9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from qerl.bench.timing import (
    Engine,
    Point,
    Start,
    gpu_state,
    measure_decoding,
    run_points,
    unless_out_of_memory,
    unmeasured,
)
from qerl.bench.workloads import Lengths, MixEngine, measure
from qerl.checkpoints.shapes import prompt_id_range
from qerl.host.console import log, track
from qerl.host.gpus import seconds
from qerl.models.policy import Policy, choose_device, load_policy, weight_bytes, with_adapter
from qerl.models.random import random_policy, with_random_adapters
from qerl.report_jobs import PointJob, RolloutJob
from qerl.results.schema import NO_MEMORY, OK, Provenance, write
from qerl.results.speeds import (
    DecodeSeconds,
    PhaseSeconds,
    PromptsPoint,
    PromptsResult,
    RolloutBenchResult,
    RolloutPoint,
)
from qerl.rollout.engine import EngineSampler
from qerl.rollout.factory import make_sampler
from qerl.rollout.sampler import Completion, Request, Sampler, SamplingParams, refuse_nan
from qerl.settings.base import ConfigError
from qerl.settings.run import AdapterSettings, EngineSettings, Kernels, NativeSettings
from qerl.settings.workflow import RolloutBench
from qerl.settings.workloads import Decoding, Mix, PointPart, Prompting

# Several runs in one engine.


def draw_all(
    sampler: Sampler, runs: int, prompts: Sequence[list[int]], params: SamplingParams
) -> list[list[Completion]]:
    """The completions of the prompts: equal parts in the order of the runs, each drawn with `params`.

    Raises ConfigError for several runs where the eager sampler draws.
    """
    if runs == 1:
        return sampler.generate(prompts, params)
    if not isinstance(sampler, EngineSampler):
        raise ConfigError("the eager sampler, which draws here, has no batch of several runs; measure them on a GPU")
    each = len(prompts) // runs
    requests = [Request(prompts[start : start + each], params) for start in range(0, len(prompts), each)]
    groups = [group for completions in sampler.generate_all(requests) for group in completions]
    refuse_nan(groups)
    return groups


# Decode speed of the engine, in tokens/s by number of sequences.

#: GiB of the KV cache, which no point reaches, so a point whose sequences don't fit is out of memory. With a bound,
#: sequences would queue, and the point would measure a smaller batch.
_UNBOUNDED = 2.0**20


def measure_points(job: PointJob[Decoding, int]) -> None:
    """Measure the parts that have no file yet, and write a file after each. All ranks share one base."""
    base = cache(lambda: random_policy(job.parts[0].work.base, 0, choose_device()))

    @contextmanager
    def engines(work: Decoding) -> Iterator[tuple[Start, dict[str, Any]]]:
        settings = NativeSettings(kv_cache_gib=_UNBOUNDED, kernels=work.kernels)
        with with_random_adapters(base(), work.rank, work.runs) as policies:

            def start(sequences: int) -> Engine:
                sampler = EngineSampler(policies[0], settings, work.runs * sequences, policies[1:])
                draw = partial(_draw, sampler, work)
                return Engine(draw, sampler.served, lambda: weight_bytes(*policies), release=sampler.release)

            yield start, {"sync_seconds": sync_seconds(policies, work.kernels) if work.rank else []}

    for part in unmeasured(job):
        measure_decoding(part, job.out / part.file, engines(part.work))


def sync_seconds(policies: Sequence[Policy], kernels: Kernels, count: int = 20) -> list[float]:
    """Seconds of each of `count` syncs of all runs after a first one, which also sets up buffers."""
    sampler = EngineSampler(policies[0], NativeSettings(kernels=kernels), 1, policies[1:])
    taken = []
    for _ in range(count + 1):
        with seconds() as one:
            sampler.sync()
        taken.append(one.value)
    return taken[1:]


def _draw(sampler: EngineSampler, work: Decoding, prompts: list[list[int]], count: int, seed: int) -> int:
    """Draw `count` tokens after each prompt; the number of all."""
    # A shorter warm-up has room for as many tokens as the timed runs, because the kernels depend on it.
    shorter = 1 < count <= work.tokens
    lengths = ((count,),) * (len(prompts) // work.runs) if shorter else None
    room = work.tokens + 1 if shorter else count
    params = SamplingParams(max_tokens=room, lengths=lengths, seed=seed, ignore_eos=True)
    groups = draw_all(sampler, work.runs, prompts, params)
    return sum(len(completion.token_ids) for group in groups for completion in group)


# Prefill time of the engine: each call draws one token after each prompt.
#
# The whole call is timed, host work included. The first call of each point may compile kernels and capture a graph, so
# its time is stored apart from the samples. So is the change in reserved memory that it causes.

_SETTINGS = NativeSettings(kv_cache_gib=8.0)


def measure_prompts(job: PointJob[Prompting, tuple[int, int]]) -> None:
    """Time all points and write the result. Points that run out of memory are stored with that status."""
    for part in unmeasured(job):
        sampler = unless_out_of_memory(partial(_ready_sampler, part))
        points = []
        for prompts, tokens in track(part.points, len(part.points), "points"):
            point = sampler and unless_out_of_memory(
                partial(measure_prefill, sampler, prompts, tokens, part.work.repeats)
            )
            missing = PromptsPoint(prompts=prompts, tokens=tokens, status=NO_MEMORY, first=None, samples=[])
            points.append(point or missing)
        result = PromptsResult(
            bench=part.work.bench,
            work=part.work,
            sampler=sampler.served if sampler else "",
            points=points,
            gpu=gpu_state(),
            provenance=Provenance.of_now(),
        )
        write(job.out / part.file, result)


def _ready_sampler(part: PointPart[Prompting, tuple[int, int]]) -> EngineSampler:
    """The sampler after a call as large as the largest point, which allocates its cache."""
    sampler = EngineSampler(random_policy(part.work.base, part.work.rank, choose_device()), _SETTINGS)
    most, longest = (max(numbers) for numbers in zip(*part.points, strict=True))
    first, _ = prompt_id_range(sampler.policy.lm.config.vocab_size)
    sampler.generate([[first] * longest] * most, SamplingParams(max_tokens=1))
    return sampler


def measure_prefill(sampler: EngineSampler, prompts: int, tokens: int, repeats: int) -> PromptsPoint:
    """Time calls with this number of prompts of `tokens` each, in seconds."""

    def call(round_: int) -> float:
        numbers = np.random.default_rng([prompts, tokens, round_])
        vocabulary = prompt_id_range(sampler.policy.lm.config.vocab_size)
        ids = numbers.integers(*vocabulary, size=(prompts, tokens)).tolist()
        with seconds() as elapsed:
            sampler.generate(ids, SamplingParams(max_tokens=1, seed=round_))
        return elapsed.value

    reserved = torch.cuda.memory_reserved if torch.cuda.is_available() else lambda: 0
    before = reserved()
    first = call(0)
    grown = reserved() - before
    samples = [call(round_) for round_ in range(1, 1 + repeats)]
    log.info("%d x %d: %.2f ms", prompts, tokens, 1e3 * float(np.median(samples)))
    return PromptsPoint(prompts=prompts, tokens=tokens, status=OK, first=first, samples=samples, reserved_bytes=grown)


# Rollouts of mixed lengths: by the engine on a GPU, by the eager sampler on a CPU.


def measure_mix(job: PointJob[Mix, None]) -> None:
    """Time the rollouts and write the result."""
    for part in unmeasured(job):
        measure(part.work, job.out / part.file, partial(_start, part.work))


def _start(work: Mix, workload: Lengths) -> MixEngine:
    adapted, base = ExitStack(), random_policy(work.base, 0, choose_device())
    policies = adapted.enter_context(with_random_adapters(base, work.rank, work.runs))
    sampler = make_sampler(policies[0], EngineSettings(), work.sequences, policies[1:])
    free = SamplingParams(
        max_tokens=work.tokens,
        count=work.group_size,
        ignore_eos=True,
        lengths=tuple(map(tuple, workload.completion_tokens)),
        replay=tuple(tuple(map(tuple, row.completions)) for row in workload.trace) if workload.trace else None,
    )

    def rollout(prompts: list[list[int]], round_: int) -> list[list[int]]:
        groups = draw_all(sampler, work.runs, prompts, replace(free, seed=round_))
        return [[len(completion.token_ids) for completion in group] for group in groups]

    def phases() -> PhaseSeconds | None:
        if not isinstance(sampler, EngineSampler):
            return None
        found = sampler.phases
        return PhaseSeconds(
            prefill=found.prefill,
            prefills=found.prefills,
            decode=[
                DecodeSeconds(batch=batch, steps=one.steps, sequences=one.sequences / one.steps, seconds=one.seconds)
                for batch, one in sorted(found.decode.items())
                if one.steps
            ],
            between=found.between,
            host_wait=found.host_wait,
        )

    return MixEngine(sampler.served, rollout, phases, adapted.close)


# Rollout throughput of a configuration's bases by weight format and LoRA rank (paper Table 9).


def bench_rollout(job: RolloutJob) -> None:
    """Time each weight format at each rank."""
    settings = job.settings
    points = [
        Point({"weights": weights, "rank": rank}, partial(_measure, job.checkpoints[weights], rank, settings))
        for rank in settings.ranks
        for weights in settings.weights
    ]
    rows = [
        RolloutPoint(
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
        for point in run_points(points, settings.repeats, settings.interleave)
    ]
    stamp = Provenance.of_now(settings.seed)
    result = RolloutBenchResult(bench=job.bench, kind="rollout", model=settings.model, points=rows, provenance=stamp)
    write(job.out, result)


def _measure(checkpoint: Path, rank: int, settings: RolloutBench) -> Callable[[int], dict[str, Any]]:
    """Load the base, with a random adapter unless the rank is 0; the function times a round."""
    if rank == 0:
        policy = load_policy(checkpoint, None, settings.dtype)
    else:
        policy = with_adapter(checkpoint, AdapterSettings(rank=rank), settings.dtype, settings.seed)
        for name, parameter in policy.trainable():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=1e-3)
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
