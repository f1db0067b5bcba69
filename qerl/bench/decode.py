"""Decode and prefill speed of the native engine on random weights of known shapes."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache, partial

import numpy as np
import torch

from qerl.bench.timing import DecodePoints, Engine, Start, gpu_state, unless_out_of_memory
from qerl.checkpoints.shapes import prompt_id_range
from qerl.host.console import log, track
from qerl.host.gpus import seconds
from qerl.jobs import PointJob, PointPart
from qerl.models.policy import Policy, choose_device, weight_bytes
from qerl.models.random import random_policy, with_random_adapter
from qerl.results.schema import NO_MEMORY, OK, Provenance
from qerl.results.speeds import PromptPoint, PromptsResult
from qerl.results.store import write
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.run import Kernels, NativeSettings
from qerl.settings.workloads import Decoding, Prompting

# Decode speed of the native engine on random weights of known shapes, in tokens/s by number of sequences.
#
# `qerl.bench.timing` does the timing and writes the result. Weights are never written to disk.

#: GiB of the KV cache, which no point reaches, so a point whose sequences don't fit is out of memory. With a bound,
#: sequences would queue, and the point would measure a smaller batch.
_UNBOUNDED = 2.0**20


def engine_of(policy: Policy, work: Decoding, sequences: int) -> Engine:
    """The native engine for a number of sequences."""
    sampler = EngineSampler(policy, NativeSettings(kv_cache_gib=_UNBOUNDED, kernels=work.kernels), sequences)

    def draw(prompts: list[list[int]], count: int, seed: int) -> int:
        # A shorter warm-up has room for as many tokens as the timed runs, because the kernels depend on it.
        shorter = 1 < count <= work.tokens
        lengths = ((count,),) * len(prompts) if shorter else None
        room = work.tokens + 1 if shorter else count
        groups = sampler.generate(prompts, SamplingParams(max_tokens=room, lengths=lengths, seed=seed, ignore_eos=True))
        return sum(len(completion.token_ids) for group in groups for completion in group)

    return Engine(draw, sampler.served, lambda: weight_bytes(policy), release=sampler.release)


def sync_seconds(policy: Policy, kernels: Kernels, count: int = 20) -> list[float]:
    """Seconds of each of `count` syncs after a first one, which also sets up buffers."""
    sampler = EngineSampler(policy, NativeSettings(kernels=kernels), 1)
    taken = []
    for _ in range(count + 1):
        with seconds() as one:
            sampler.sync()
        taken.append(one.value)
    return taken[1:]


def measure_points(job: PointJob[Decoding, int]) -> None:
    """Measure the points that the job's files lack, and write a file after each. All ranks share one base."""
    base = cache(lambda: random_policy(job.parts[0].work.base, 0, choose_device()))
    for part in job.parts:
        work, points = part.work, DecodePoints(job.out / part.file, part.work)
        with ExitStack() as adapted:

            def load(work: Decoding = work, points: DecodePoints = points, adapted: ExitStack = adapted) -> Start:
                policy = adapted.enter_context(with_random_adapter(base(), work.rank))
                points.note_syncs(sync_seconds(policy, work.kernels) if work.rank else [])
                return partial(engine_of, policy, work)

            points.run(part.points, load)


# Prefill time of the project's engine on random weights: each call draws one token after each prompt.
#
# The whole call is timed, host work included. The first call of each point may compile kernels and capture a graph, so
# its time is stored apart from the samples. So is the change in reserved memory that it causes.

_SETTINGS = NativeSettings(kv_cache_gib=8.0)


def measure_prompts(job: PointJob[Prompting, tuple[int, int]]) -> None:
    """Time all points and write the result. Points that run out of memory are stored with that status."""
    for part in job.parts:
        work, points = part.work, part.points
        sampler = unless_out_of_memory(lambda part=part: _ready_sampler(part))  # type: ignore[misc]
        result = PromptsResult(
            bench="prompts",
            work=work,
            sampler=sampler.served if sampler else "",
            points=[_point(sampler, *point, work.repeats) for point in track(points, len(points), "points")],
            gpu=gpu_state(),
            provenance=Provenance.of_now(),
        )
        write(job.out / part.file, result)


def _ready_sampler(part: PointPart[Prompting, tuple[int, int]]) -> EngineSampler:
    """The sampler after a call as large as the largest point, which allocates its cache."""
    work = part.work
    sampler = EngineSampler(random_policy(work.base, work.rank, choose_device()), _SETTINGS)
    most, longest = (max(numbers) for numbers in zip(*part.points, strict=True))
    first, _ = prompt_id_range(sampler.policy.lm.config.vocab_size)
    sampler.generate([[first] * longest] * most, SamplingParams(max_tokens=1))
    return sampler


def _point(sampler: EngineSampler | None, prompts: int, tokens: int, repeats: int) -> PromptPoint:
    point = unless_out_of_memory(lambda: measure_prefill(sampler, prompts, tokens, repeats)) if sampler else None
    return point or PromptPoint(prompts=prompts, tokens=tokens, status=NO_MEMORY, first=None, samples=[])


def measure_prefill(sampler: EngineSampler, prompts: int, tokens: int, repeats: int) -> PromptPoint:
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
    return PromptPoint(prompts=prompts, tokens=tokens, status=OK, first=first, samples=samples, reserved_bytes=grown)
