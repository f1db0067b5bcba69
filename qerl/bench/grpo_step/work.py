"""The work of a GRPO step on which this project and TRL are timed, and the schema of the results.

Weights are random, since only the amount of work matters. Prompts have an exact length, and no stop token ends a
completion. Only a LoRA adapter on all seven projections is trained, with one update per rollout. Rewards differ within
a group, except in the share of groups that the work wants equal.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from qerl.bench.lengths import lognormal_lengths
from qerl.data.prompts import prompt_ids
from qerl.data.records import Problem
from qerl.host.progress import log
from qerl.jobs.shapes import Work
from qerl.results.files import write
from qerl.results.schema.speed import (
    EngineStepSettings,
    GivenUp,
    GrpoStepResult,
    StepMemory,
    StepWork,
    TimedStep,
    TrlStepSettings,
)
from qerl.results.schema.stored import NO_MEMORY, OK, Provenance
from qerl.rl.rewards import Answer

#: Untimed steps at the start, in which kernels are compiled and engines set up.
WARMUP = 1
_REWARDS = 2**16
#: The expected answer of a problem whose completions earn the same.
_EQUAL = "equal"
SystemSettings = EngineStepSettings | TrlStepSettings


def steps_of(work: Work) -> int:
    """The number of steps, warm-up included."""
    return WARMUP + work.repeats


def completion_lengths(work: Work) -> tuple[tuple[int, ...], ...]:
    """Tokens of each completion of each prompt of a step; all steps have the same."""
    if work.median is None or work.sigma is None:
        return ((work.completion_tokens,) * work.group,) * work.prompts
    numbers, shape = np.random.default_rng(0), (work.prompts, work.group)
    drawn = lognormal_lengths(numbers, work.median, work.sigma, work.completion_tokens, shape)
    return tuple(map(tuple, drawn))


def check_drawn(work: Work, completion_tokens: int) -> None:
    """Raise RuntimeError unless a step drew all its tokens."""
    wanted = sum(map(sum, completion_lengths(work)))
    if completion_tokens != wanted:
        raise RuntimeError(f"a step drew {completion_tokens} tokens instead of {wanted}: its time says nothing")


def questions(tokenizer: PreTrainedTokenizerBase, count: int, tokens: int) -> list[str]:
    """`count` questions of random digits, each a prompt of exactly `tokens` in the chat template."""
    digits = tokens - len(prompt_ids(tokenizer, "", ""))
    if digits < 1:
        raise ValueError(f"the chat template alone has {tokens - digits} tokens; use longer prompts than {tokens}")
    numbers = random.Random(0)
    drawn = ["".join(numbers.choices("0123456789", k=digits)) for _ in range(count)]
    if any(len(prompt_ids(tokenizer, question, "")) != tokens for question in drawn):
        raise RuntimeError("a digit isn't a token of this tokenizer; use one that splits numbers into digits")
    return drawn


def text_reward(text: str) -> float:
    """A reward from 0 to 1: a hash of the completion, so that rewards differ even within a group of two."""
    return zlib.crc32(text.encode()) % _REWARDS / _REWARDS


def equal_prompts(work: Work) -> int:
    """The number of a step's prompts whose completions earn the same."""
    return round(work.equal_groups * work.prompts)


def is_equal(work: Work, number: int) -> bool:
    """Whether the completions of the question `number`, counted over all steps, earn the same; evenly spread."""
    place = number % work.prompts
    return (place + 1) * equal_prompts(work) // work.prompts > place * equal_prompts(work) // work.prompts


def problem(question: str, number: int, equal: bool) -> Problem:
    """A question as a problem for `reward`."""
    return Problem(str(number), question, None, _EQUAL if equal else "0")


def reward(answer: Answer, problem: Problem) -> float:
    """`text_reward` as a reward function of a run, or 0 for a problem whose completions earn the same."""
    return 0.0 if problem.answer == _EQUAL else text_reward(answer.text)


def memory_of(peak: float, kv_cache: int, parts: dict[str, int]) -> StepMemory:
    """Bytes of memory that PyTorch allocated on the GPU; on a CPU those of the process, with a cache of 0 bytes.

    `parts` are disjoint; the rest of the peak without the cache is activations, logits and buffers. `device_bytes` is
    all memory in use on the GPU now, by any process.
    """
    without = int(peak) - kv_cache
    return StepMemory(
        peak_bytes=int(peak),
        kv_cache_bytes=kv_cache,
        without_kv_cache_bytes=without,
        parts={**parts, "rest": without - sum(parts.values())},
        device_bytes=device_bytes(),
    )


def device_bytes() -> int | None:
    """Bytes in use on the GPU, including reserved memory, contexts and graphs; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free


def write_steps(
    out: Path,
    system: str,
    sampler: str,
    work: Work,
    settings: SystemSettings,
    steps: Sequence[TimedStep],
    memory: StepMemory,
    given_up: GivenUp | None = None,
) -> None:
    """Write a result: the timed steps, the memory at their highest peak, and the settings.

    `system` is a short name for tables, `sampler` describes the sampler and its weights, and `settings` are the
    system's. `given_up` is what this project's engine and update did without.
    """
    if len(steps) != work.repeats:
        raise RuntimeError(f"{len(steps)} steps were timed instead of {work.repeats}")
    result = GrpoStepResult(
        bench="grpo_step",
        system=system,
        work=_stored(work),
        settings=settings,
        status=OK,
        sampler=sampler,
        warmup_steps=WARMUP,
        steps=tuple(steps),
        memory=memory,
        given_up=given_up,
        provenance=Provenance.of_now(),
    )
    write(out, result)


def write_out_of_memory(
    out: Path, system: str, work: Work, settings: SystemSettings, error: torch.cuda.OutOfMemoryError
) -> None:
    """Write a result without steps, with the error's message."""
    log.warning("%s: %s", NO_MEMORY, str(error))
    result = GrpoStepResult(
        bench="grpo_step",
        system=system,
        work=_stored(work),
        settings=settings,
        status=NO_MEMORY,
        message=str(error),
        provenance=Provenance.of_now(),
    )
    write(out, result)


def _stored(work: Work) -> StepWork:
    return StepWork(**work.model_dump())
