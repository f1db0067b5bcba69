"""Points of decode speed: timing and the result file, shared by all engines of `qerl.bench.decode`.

A job is one engine, shape, weight format and rank; a point is a number of sequences. A job resumes its file: it
measures only the points that are missing. The prompts' time, that of drawing one token, is subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np
import torch

from qerl.bench.ceilings import ceilings, gpu_state
from qerl.checkpoints.published import prompt_ids
from qerl.host.profiling import free_memory, reset_peak_memory, seconds
from qerl.host.progress import log, track
from qerl.jobs.shapes import WARM_UP, Decoding, enough_runs
from qerl.policy.policy import choose_device
from qerl.provenance.files import check_writable
from qerl.provenance.stamp import machine
from qerl.results.files import ResultError, read, write
from qerl.results.schema.speed import DecodePoint, DecodeResult, GpuStates
from qerl.results.schema.stored import NO_MEMORY, OK, Provenance
from qerl.rl.failures import OUT_OF_MEMORY
from qerl.settings.base import ConfigError

T = TypeVar("T")

#: Takes prompts of one length, the number of tokens to draw for each, and a seed; returns the total number drawn.
Draw = Callable[[list[list[int]], int, int], int]
#: Takes a number of sequences and measures that point.
Measure = Callable[[int], DecodePoint]


@dataclass(frozen=True)
class Timing:
    """Decoded tokens/s and seconds of the prompts alone, with one sample per round."""

    samples: list[float]
    prompt_samples: list[float]

    def point(self, sequences: int, sampler: str, weight_bytes: int, peak_memory_bytes: int | None) -> DecodePoint:
        """The point of a sampler. The peak is None for an engine that reserves a fixed share of memory."""
        return DecodePoint(
            sequences=sequences,
            status=OK,
            samples=self.samples,
            prompt_seconds=median(self.prompt_samples),
            prompt_samples=self.prompt_samples,
            sampler=sampler,
            peak_memory_bytes=peak_memory_bytes,
            weight_bytes=weight_bytes,
        )


class DecodePoints:
    """The points of a job and their file, which is rewritten after each point.

    Ceilings, the GPU's state and the stamp come from the last call that measured anything.
    """

    def __init__(self, out: Path, work: Decoding) -> None:
        """Read the file if there is one. Raises ConfigError if another job or another machine wrote it."""
        check_writable(out)
        self.out = out
        self.work = work
        self.result = _read(out, work) if out.exists() else _empty(work)

    def missing(self, sequences: Sequence[int]) -> list[int]:
        """The numbers of sequences that have no point yet."""
        measured = {point.sequences for point in self.result.points}
        return [count for count in dict.fromkeys(sequences) if count not in measured]

    def note_syncs(self, sync_seconds: list[float]) -> None:
        """Store seconds of syncs in the result, beside the points."""
        self.result = self.result.model_copy(update={"sync_seconds": sync_seconds})

    def run(self, sequences: Sequence[int], load: Callable[[], Measure]) -> None:
        """Measure the missing points. `load` returns the function that measures; it is called only if points are
        missing.

        A point that runs out of memory is stored with that status. If `load` runs out, all missing points are.
        """
        missing = self.missing(sequences)
        if not missing:
            log.info("%s has all points; delete it to measure them again", self.out)
            return
        gpu = GpuStates(before=gpu_state(), after=None) if torch.cuda.is_available() else None
        self.result = self.result.model_copy(update={"ceilings": ceilings(choose_device()), "gpu": gpu})
        self._write()
        measure = unless_out_of_memory(load)
        for count in track(missing, len(missing), "points"):
            self._record(count, measure)

    def _record(self, sequences: int, measure: Measure | None) -> None:
        reset_peak_memory()
        point = unless_out_of_memory(lambda: measure(sequences)) if measure else None
        point = point or _failed(sequences)
        points = sorted([*self.result.points, point], key=lambda point: point.sequences)
        gpu = self.result.gpu and GpuStates(before=self.result.gpu.before, after=gpu_state())
        self.result = self.result.model_copy(update={"points": points, "gpu": gpu})
        self._write()
        speed = f"{median(point.samples):.1f} tokens a second" if point.samples else point.status
        log.info("%s, %d sequences: %s", self.work, sequences, speed)

    def _write(self) -> None:
        self.result = self.result.model_copy(update={"provenance": Provenance.of_now()})
        write(self.out, self.result)


def _empty(work: Decoding) -> DecodeResult:
    provenance = Provenance.of_now()
    return DecodeResult(bench="decode", **work.model_dump(), ceilings=None, gpu=None, points=[], provenance=provenance)


def _read(out: Path, work: Decoding) -> DecodeResult:
    again = "delete it, or name another file"
    try:
        result = read(DecodeResult, out)
    except ResultError as error:
        raise ConfigError(f"{error}; {again}") from None
    for name, value in work.model_dump().items():
        if (measured := getattr(result, name)) != value:
            raise ConfigError(f"{out} has points of {name}={measured}, not {value}; {again}")
    if result.provenance.machine.label != machine()["label"]:
        raise ConfigError(f"{out} has points of another machine, {result.provenance.machine.label}; {again}")
    return result


def _failed(sequences: int) -> DecodePoint:
    return DecodePoint(
        sequences=sequences,
        status=NO_MEMORY,
        samples=[],
        prompt_seconds=None,
        prompt_samples=[],
        sampler=None,
        peak_memory_bytes=None,
        weight_bytes=None,
    )


def unless_out_of_memory(action: Callable[[], T]) -> T | None:
    """The return value of `action`, or None if it runs out of memory; its memory is then released."""
    try:
        return action()
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        log.warning("%s: %s", NO_MEMORY, str(error))  # only its text, since a log may keep the error and its frames
    # The error has been deleted, and with it the frames that referenced tensors.
    free_memory()
    return None


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one in its chain of causes, means that memory ran out."""
    while error is not None:
        if isinstance(error, OUT_OF_MEMORY):
            return True
        error = error.__cause__
    return False


def check_room(pages: int, page: int, sequences: int, length: int) -> None:
    """Raise OutOfMemoryError if a KV cache of `pages` of `page` tokens can't hold these sequences of `length`.

    Otherwise the engine would queue some of them, and the point would measure a smaller batch.
    """
    needed = sequences * -(-length // page)
    if pages < needed:
        raise torch.cuda.OutOfMemoryError(f"the KV cache has {pages} pages, and the sequences need {needed}")


def timed(draw: Draw, sequences: int, prompt: int, tokens: int, vocabulary: int) -> Timing:
    """Time decoding after a warm-up of at most `WARM_UP` tokens. The median time of the prompts alone, whose ids a
    `vocabulary` of so many tokens has, is subtracted.
    """

    def taken(count: int, round_: int) -> float:
        numbers = np.random.default_rng([sequences, round_])
        prompts = numbers.integers(*prompt_ids(vocabulary), size=(sequences, prompt)).tolist()
        with seconds() as elapsed:
            drawn = draw(prompts, count, round_)
        if drawn != sequences * count:
            raise RuntimeError(f"{drawn} tokens were drawn instead of {sequences * count}: their time says nothing")
        return elapsed.value

    taken(min(tokens, WARM_UP) + 1, 0)
    # Alternately, so that a busy CPU, which launches the prompts, slows both kinds of samples alike.
    both: list[tuple[float, float]] = []
    while not enough_runs([whole for _, whole in both]):
        both.append((taken(1, 100 + len(both)), taken(tokens + 1, 1 + len(both))))
    alone = [one for one, _ in both]
    prompts = median(alone)
    decoding = [whole - prompts for _, whole in both]
    if min(decoding) <= 0:
        raise RuntimeError(f"{tokens} tokens take no longer than the prompts' own time varies; decode more of them")
    return Timing([sequences * tokens / one for one in decoding], alone)
