"""The workload of a rollout of mixed lengths, drawn from a seed or read from a trace, and the timing of an engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from qerl.bench.ceilings import gpu_state
from qerl.bench.lengths import lognormal_lengths
from qerl.checkpoints.published import prompt_ids, vocabulary
from qerl.host.profiling import seconds
from qerl.host.progress import log
from qerl.jobs.shapes import Mix, RolloutMixJob
from qerl.results.files import read_rows, write
from qerl.results.schema.speed import (
    DraftsVerified,
    GpuStates,
    MixRun,
    MixWork,
    PhaseSeconds,
    RolloutMixResult,
    TraceRow,
)
from qerl.results.schema.stored import NO_MEMORY, OK, Provenance
from qerl.settings.base import ConfigError


@dataclass(frozen=True)
class Workload:
    """The number of tokens of each prompt and of each of its completions; with a trace also the tokens.

    Random prompts have ids from the first of `ids` to the one before the second.
    """

    ids: tuple[int, int]
    prompt_tokens: list[int]
    completion_tokens: list[list[int]]
    trace: list[TraceRow] | None = None

    @staticmethod
    def of(work: Mix) -> Workload:
        """Read the trace of `work`, or draw lengths: uniform for prompts, lognormal and clipped for completions."""
        if work.trace is not None:
            return _traced(work, work.trace)
        numbers = np.random.default_rng(work.seed)
        least, most = work.prompt_tokens
        prompts = numbers.integers(least, most, size=work.prompts, endpoint=True)
        shape = work.prompts, work.group
        lengths = lognormal_lengths(numbers, work.median, work.sigma, work.longest, shape)
        return Workload(prompt_ids(vocabulary(work.size)), prompts.tolist(), lengths)

    def prompts(self, seed: int, round_: int) -> list[list[int]]:
        """The prompts of the trace, or random ones that differ in each round, so that no prefix cache has them."""
        if self.trace is not None:
            return [row.prompt for row in self.trace]
        numbers = np.random.default_rng([seed, round_])
        return [numbers.integers(*self.ids, size=tokens).tolist() for tokens in self.prompt_tokens]

    def check(self, drawn: list[list[int]]) -> None:
        """Raise RuntimeError unless all completions have the requested lengths."""
        if drawn != self.completion_tokens:
            tokens, wanted = sum(map(sum, drawn)), sum(map(sum, self.completion_tokens))
            raise RuntimeError(f"the engine drew {tokens} tokens of other lengths than the {wanted} asked for")


def _traced(work: Mix, trace: Path) -> Workload:
    rows = [row for row in read_rows(TraceRow, trace) if len(row.completions) >= work.group][: work.prompts]
    if len(rows) < work.prompts:
        raise ConfigError(
            f"{trace} has {len(rows)} prompts of {work.group} completions, not {work.prompts}; lower both"
        )
    cut = [[ids[: work.longest] for ids in row.completions[: work.group]] for row in rows]
    kept = [TraceRow(prompt=row.prompt, completions=group) for row, group in zip(rows, cut, strict=True)]
    lengths = [[len(tokens) for tokens in group] for group in cut]
    return Workload(prompt_ids(vocabulary(work.size)), [len(row.prompt) for row in rows], lengths, kept)


@dataclass(frozen=True)
class MixEngine:
    """A started engine. `rollout` takes prompts and the round's number, and returns the lengths of completions."""

    description: str
    rollout: Callable[[list[list[int]], int], list[list[int]]]
    phases: Callable[[], PhaseSeconds | None] = lambda: None
    drafts: Callable[[], DraftsVerified | None] = lambda: None
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class _Timed:
    """The rollouts of an engine. The first one compiles kernels and captures graphs."""

    description: str
    ready_seconds: float
    first: MixRun
    runs: tuple[MixRun, ...]


def measure(job: RolloutMixJob, start: Callable[[Workload], MixEngine]) -> None:
    """Time an engine and write the result. The first rollout is stored apart; running out of memory is a result."""
    workload = Workload.of(job.work)
    before = gpu_state() if torch.cuda.is_available() else None
    with ExitStack() as running:  # to close an engine takes seconds: the result is written before
        timed = _timed(job.work, workload, start, running)
        result = RolloutMixResult(
            bench="rollout_mix",
            work=MixWork(**job.work.model_dump(mode="json")),
            prompt_tokens=workload.prompt_tokens,
            completion_tokens=workload.completion_tokens,
            status=OK if timed else NO_MEMORY,
            sampler=timed.description if timed else "",
            ready_seconds=timed.ready_seconds if timed else None,
            first_seconds=timed.first.seconds if timed else None,
            runs=timed.runs if timed else (),
            gpu=GpuStates(before=before, after=gpu_state()) if torch.cuda.is_available() else None,
            provenance=Provenance.of_now(job.work.seed),
        )
        write(job.out, result)


def _timed(work: Mix, workload: Workload, start: Callable[[Workload], MixEngine], running: ExitStack) -> _Timed | None:
    """Time an engine, which `running` closes; None if memory runs out."""
    try:
        with seconds() as ready:
            engine = start(workload)
        running.callback(engine.close)
        first, *runs = (_run(work, workload, engine, round_) for round_ in range(1 + work.repeats))
    except torch.cuda.OutOfMemoryError as error:
        log.warning("out of memory: %s", str(error))
        return None
    return _Timed(engine.description, ready.value, first, tuple(runs))


def _run(work: Mix, workload: Workload, engine: MixEngine, round_: int) -> MixRun:
    prompts = workload.prompts(work.seed, round_)
    with seconds() as elapsed:
        drawn = engine.rollout(prompts, round_)
    workload.check(drawn)
    tokens = sum(map(sum, drawn))
    log.info("%d tokens in %.2f s: %.0f tokens a second", tokens, elapsed.value, tokens / elapsed.value)
    return MixRun(seconds=elapsed.value, phases=engine.phases(), drafts=engine.drafts())
