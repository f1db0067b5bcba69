"""Prefill time of the project's engine on random weights: each call draws one token after each prompt.

The whole call is timed, host work included. The first call of each point may compile kernels and capture a graph, so
its time is stored apart from the samples. So is the change in reserved memory that it causes.
"""

from __future__ import annotations

import numpy as np
import torch

from qerl.bench.ceilings import gpu_state
from qerl.bench.decode.points import unless_out_of_memory
from qerl.checkpoints.published import prompt_ids
from qerl.host.profiling import seconds
from qerl.host.progress import log, track
from qerl.jobs.shapes import PromptsJob
from qerl.policy.policy import choose_device
from qerl.random_models.policy import random_policy
from qerl.results.files import write
from qerl.results.schema.speed import PromptPoint, PromptsResult
from qerl.results.schema.stored import NO_MEMORY, OK, Provenance
from qerl.rollout.engine.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.rollout import NativeSettings

_SETTINGS = NativeSettings(kv_cache_gib=8.0)


def measure_prompts(job: PromptsJob) -> None:
    """Time all points and write the result. Points that run out of memory are stored with that status."""
    sampler = unless_out_of_memory(lambda: _ready_sampler(job))
    result = PromptsResult(
        bench="prompts",
        **job.work.model_dump(),
        sampler=sampler.served if sampler else "",
        points=[_point(sampler, *point, job.repeats) for point in track(job.points, len(job.points), "points")],
        gpu=gpu_state(),
        provenance=Provenance.of_now(),
    )
    write(job.out, result)


def _ready_sampler(job: PromptsJob) -> EngineSampler:
    """The sampler after a call as large as the largest point, which allocates its cache."""
    work = job.work
    sampler = EngineSampler(random_policy(work.size, work.weights, work.rank, choose_device()), _SETTINGS)
    most, longest = (max(numbers) for numbers in zip(*job.points, strict=True))
    first, _ = prompt_ids(sampler.policy.lm.config.vocab_size)
    sampler.generate([[first] * longest] * most, SamplingParams(max_tokens=1))
    return sampler


def _point(sampler: EngineSampler | None, prompts: int, tokens: int, repeats: int) -> PromptPoint:
    point = unless_out_of_memory(lambda: measure(sampler, prompts, tokens, repeats)) if sampler else None
    return point or PromptPoint(prompts=prompts, tokens=tokens, status=NO_MEMORY, first=None, samples=[])


def measure(sampler: EngineSampler, prompts: int, tokens: int, repeats: int) -> PromptPoint:
    """Time calls with this number of prompts of `tokens` each, in seconds."""
    reserved = _reserved()
    first = _call(sampler, prompts, tokens, 0)
    grown = _reserved() - reserved
    samples = [_call(sampler, prompts, tokens, round_) for round_ in range(1, 1 + repeats)]
    log.info("%d x %d: %.2f ms", prompts, tokens, 1e3 * float(np.median(samples)))
    return PromptPoint(prompts=prompts, tokens=tokens, status=OK, first=first, samples=samples, reserved_bytes=grown)


def _call(sampler: EngineSampler, prompts: int, tokens: int, round_: int) -> float:
    numbers = np.random.default_rng([prompts, tokens, round_])
    ids = numbers.integers(*prompt_ids(sampler.policy.lm.config.vocab_size), size=(prompts, tokens)).tolist()
    with seconds() as elapsed:
        sampler.generate(ids, SamplingParams(max_tokens=1, seed=round_))
    return elapsed.value


def _reserved() -> int:
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
