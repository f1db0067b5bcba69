"""The workloads on which engines are compared: rollouts of mixed lengths, and the work of a GRPO step."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from qerl.bench.timing import gpu_state, unless_out_of_memory
from qerl.checkpoints.shapes import prompt_id_range, vocabulary
from qerl.data.prompts import prompt_ids
from qerl.data.records import Problem
from qerl.host.console import log
from qerl.host.gpus import seconds
from qerl.results.schema import NO_MEMORY, OK, Provenance, read_rows, write
from qerl.results.speeds import GpuStates, GrpoStepResult, MixRun, PhaseSeconds, RolloutMixResult, StepMemory, TraceRow
from qerl.rl.rewards import Answer
from qerl.settings.base import ConfigError
from qerl.settings.workloads import EngineStep, Mix, StepWork, TrlStep


def lognormal_lengths(
    numbers: np.random.Generator, median: int, sigma: float, longest: int, shape: tuple[int, int]
) -> list[list[int]]:
    """Tokens of each completion of each prompt, from 1 to `longest`. `sigma` is the standard deviation of their log."""
    drawn = numbers.lognormal(math.log(median), sigma, size=shape)
    lengths: list[list[int]] = drawn.round().clip(1, longest).astype(int).tolist()
    return lengths


# The workload of a rollout of mixed lengths, drawn from a seed or read from a trace, and the timing of an engine.


@dataclass(frozen=True)
class Lengths:
    """The number of tokens of each prompt and of each of its completions; with a trace also the tokens.

    Random prompts have ids from the first of `ids` to the one before the second.
    """

    ids: tuple[int, int]
    prompt_tokens: list[int]
    completion_tokens: list[list[int]]
    trace: list[TraceRow] | None = None

    @staticmethod
    def of(work: Mix) -> Lengths:
        """Read the trace of `work`, or draw lengths: uniform for prompts and a tail of completions, else lognormal."""
        if work.trace is not None:
            return _traced(work, work.trace)
        numbers = np.random.default_rng(work.seed)
        least, most = work.prompt
        prompts = numbers.integers(least, most, size=work.prompts, endpoint=True)
        shape = work.prompts, work.group_size
        lengths = lognormal_lengths(numbers, work.median, work.sigma, work.tokens, shape)
        if work.tail:
            uniform = numbers.integers(max(work.tokens // 4, 1), work.tokens, size=shape, endpoint=True)
            lengths = np.where(numbers.random(shape) < work.tail, uniform, lengths).tolist()
        return Lengths(prompt_id_range(vocabulary(work.size)), prompts.tolist(), lengths)

    def prompts(self, seed: int, round_: int, runs: int = 1) -> list[list[int]]:
        """The prompts of the trace, or random ones that differ in each round, so that no prefix cache has them.

        Those of several runs follow one another.
        """
        if self.trace is not None:
            return [row.prompt for row in self.trace] * runs
        numbers = np.random.default_rng([seed, round_])
        return [numbers.integers(*self.ids, size=tokens).tolist() for tokens in self.prompt_tokens * runs]


def _traced(work: Mix, trace: Path) -> Lengths:
    rows = [row for row in read_rows(TraceRow, trace) if len(row.completions) >= work.group_size][: work.prompts]
    if len(rows) < work.prompts:
        raise ConfigError(
            f"{trace} has {len(rows)} prompts of {work.group_size} completions, not {work.prompts}; lower both"
        )
    cut = [[ids[: work.tokens] for ids in row.completions[: work.group_size]] for row in rows]
    kept = [TraceRow(prompt=row.prompt, completions=group) for row, group in zip(rows, cut, strict=True)]
    lengths = [[len(tokens) for tokens in group] for group in cut]
    return Lengths(prompt_id_range(vocabulary(work.size)), [len(row.prompt) for row in rows], lengths, kept)


@dataclass(frozen=True)
class MixEngine:
    """A started engine. `rollout` takes the prompts of all runs and the round's number, and returns the lengths of
    completions.
    """

    description: str
    rollout: Callable[[list[list[int]], int], list[list[int]]]
    phases: Callable[[], PhaseSeconds | None] = lambda: None
    close: Callable[[], None] = lambda: None


def measure(work: Mix, out: Path, start: Callable[[Lengths], MixEngine]) -> None:
    """Time an engine and write the result. The first rollout is stored apart; running out of memory is a result."""
    workload, before = Lengths.of(work), gpu_state()
    with ExitStack() as running:  # to close an engine takes seconds: the result is written before

        def timed() -> dict[str, Any]:
            with seconds() as started:
                engine = start(workload)
            running.callback(engine.close)
            first, *runs = [_run(work, workload, engine, round_) for round_ in range(1 + work.repeats)]
            return {
                "status": OK,
                "sampler": engine.description,
                "ready_seconds": started.value,
                "first_seconds": first.seconds,
                "runs": tuple(runs),
            }

        found = unless_out_of_memory(timed) or {"status": NO_MEMORY}
        result = RolloutMixResult(
            bench=work.bench,
            work=work,
            prompt_tokens=workload.prompt_tokens,
            completion_tokens=workload.completion_tokens,
            gpu=None if before is None else GpuStates(before=before, after=gpu_state()),
            provenance=Provenance.of_now(work.seed),
            **found,
        )
        write(out, result)


def _run(work: Mix, workload: Lengths, engine: MixEngine, round_: int) -> MixRun:
    prompts, lengths = workload.prompts(work.seed, round_, work.runs), workload.completion_tokens * work.runs
    with seconds() as elapsed:
        drawn = engine.rollout(prompts, round_)
    if drawn != lengths:
        tokens, wanted = sum(map(sum, drawn)), sum(map(sum, lengths))
        raise RuntimeError(f"the engine drew {tokens} tokens of other lengths than the {wanted} asked for")
    tokens = sum(map(sum, drawn))
    log.info("%d tokens in %.2f s: %.0f tokens a second", tokens, elapsed.value, tokens / elapsed.value)
    return MixRun(seconds=elapsed.value, phases=engine.phases())


# The work of a GRPO step on which this project and TRL are timed, and the schema of the results.
#
# Weights are random, since only the amount of work matters. Prompts have an exact length, and no stop token ends a
# completion. Only a LoRA adapter on all seven projections is trained, with one update per rollout. Rewards differ
# within a group, except in the share of groups that the work wants equal.

#: Untimed steps at the start, in which kernels are compiled and engines set up.
WARMUP = 1
_REWARDS = 2**16
#: The expected answer of a problem whose completions earn the same.
_EQUAL = "equal"


def steps_of(work: StepWork) -> int:
    """The number of steps, warm-up included."""
    return WARMUP + work.repeats


def completion_lengths(work: StepWork) -> tuple[tuple[int, ...], ...]:
    """Tokens of each completion of each prompt of a step; all steps have the same."""
    if work.median is None or work.sigma is None:
        return ((work.tokens,) * work.group_size,) * work.prompts
    numbers, shape = np.random.default_rng(0), (work.prompts, work.group_size)
    drawn = lognormal_lengths(numbers, work.median, work.sigma, work.tokens, shape)
    return tuple(map(tuple, drawn))


def check_drawn(work: StepWork, completion_tokens: int) -> None:
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


def problem(question: str, number: int, equal: bool) -> Problem:
    """A question as a problem for `reward`."""
    return Problem(str(number), question, None, _EQUAL if equal else "0")


def reward(answer: Answer, problem: Problem) -> float:
    """`text_reward` as a reward function of a run, or 0 for a problem whose completions earn the same."""
    return 0.0 if problem.answer == _EQUAL else text_reward(answer.text)


def memory_of(peak: float, kv_cache: int, parts: dict[str, int]) -> StepMemory:
    """Bytes of memory that PyTorch allocated on the GPU; on a CPU the bytes of the process, with a cache of 0 bytes.

    `parts` are disjoint; the rest of the peak without the cache is activations, logits and buffers. `device_bytes` is
    all memory in use on the GPU now, by any process: reserved memory, contexts and graphs too; None on a CPU.
    """
    without, device_bytes = int(peak) - kv_cache, None
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        device_bytes = total - free
    return StepMemory(
        peak_bytes=int(peak),
        kv_cache_bytes=kv_cache,
        without_kv_cache_bytes=without,
        parts={**parts, "rest": without - sum(parts.values())},
        device_bytes=device_bytes,
    )


def write_steps(
    out: Path, system: str, work: StepWork, settings: EngineStep | TrlStep, measure: Callable[[], dict[str, Any]]
) -> None:
    """Measure steps and write their result. Running out of memory is a result without steps, with its message.

    `system` is a short name for tables, and `settings` are the system's. `measure` returns fields of `GrpoStepResult`:
    `steps`, which are the timed ones, `sampler`, `memory` at their highest peak, and what this project has `given_up`.
    """
    try:
        values = {"status": OK, "warmup_steps": WARMUP, **measure()}
    except torch.cuda.OutOfMemoryError as error:
        log.warning("%s: %s", NO_MEMORY, str(error))
        values = {"status": NO_MEMORY, "message": str(error)}
    else:
        if len(values["steps"]) != work.repeats:
            raise RuntimeError(f"{len(values['steps'])} steps were timed instead of {work.repeats}")
    result = GrpoStepResult(
        bench=work.bench, system=system, work=work, settings=settings, provenance=Provenance.of_now(), **values
    )
    write(out, result)
