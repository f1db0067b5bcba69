"""GPU-hours of the speed grid's jobs, by the committed points of the grid.

Work without a committed point is priced by the most similar one of its system. Its time then grows with the parameters,
and that of steps, rollouts and prompts with the tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from qerl.checkpoints.published import shape_of
from qerl.jobs.shapes import (
    WARM_UP,
    DecodeJob,
    Decoding,
    GrpoStepJob,
    PointJob,
    PromptsJob,
    RolloutMixJob,
    TrlStepJob,
    Work,
    enough_runs,
)
from qerl.plan.cost_model import STAND_IN, Hours, total
from qerl.plan.shapes import committed_files
from qerl.results.files import read
from qerl.results.names import weights_name, with_kernels
from qerl.results.schema.speed import DecodeResult, GrpoStepResult, Kind, PromptsResult, RolloutMixResult

#: Seconds of start-up and of what the first call compiles, by the rollouts of docs/results/h200.md. TRL starts vLLM.
START = {"native": 27.0, "qerl": 27.0, "transformers": 27.0, "vllm": 133.0, "trl": 133.0}
#: Seconds of a piece of 7B's work in a system that has no committed point, such as a decode step of transformers.
UNKNOWN = 0.05


class Timed(NamedTuple):
    """A piece of a system's work, and its seconds."""

    what: str
    size: str
    weights: str
    rank: int
    amount: int
    """Sequences of a decode step; otherwise tokens."""
    seconds: float = math.nan


class GridCosts:
    """Prices by the committed points in folders. Raises ResultError for a file that isn't one of the grid's."""

    def __init__(self, samples: Sequence[Path]) -> None:
        self._known = [piece for file in committed_files(samples) for piece in _pieces(file)]

    def hours(self, job: PointJob) -> Hours:
        """The hours of a job with its start-up. Those for which no point of this size and format is committed are
        estimates.
        """
        if isinstance(job, DecodeJob):
            points = [self._point(part.work, count) for part in job.parts for count in part.sequences]
            return _once(START[job.engine], measured=True) + total(points)
        if isinstance(job, TrlStepJob):
            return _once(START["trl"], measured=True) + self._steps(job.work, "trl", "vllm")
        if isinstance(job, GrpoStepJob):
            parts = (
                self._steps(part.work, "qerl", with_kernels("native", part.settings.kernels)) for part in job.parts
            )
            return _once(START["qerl"], measured=True) + total(parts)
        asked, times, engine = _whole(job)
        return _once(START[engine], measured=True) + total(self._price(piece, times) for piece in asked)

    def _steps(self, work: Work, system: str, engine: str) -> Hours:
        """The hours of steps: their rollouts decode like the engine's points, and their updates read all tokens.

        Our warm-up decodes few tokens where all completions have the same length.
        """
        policy = (work.size, _weights(work), work.rank)
        tokens = work.completions * (work.prompt_tokens + work.completion_tokens)
        decode = Timed(f"decode {engine}", *policy, work.completions)
        short = system == "qerl" and work.median is None
        warm_up = min(work.completion_tokens, WARM_UP) if short else work.completion_tokens
        rollouts = [
            self._price(decode, count, grows=False) for count in (warm_up, *[work.completion_tokens] * work.repeats)
        ]
        update = self._price(Timed(f"update {system}", *policy, tokens))
        return total(rollouts + [update] * (1 + work.repeats))

    def _point(self, work: Decoding, sequences: int) -> Hours:
        """The hours of a decode point: a warm-up and repeats, beside each of which the prompts are timed alone."""
        policy = (with_kernels(work.engine, work.kernels), work.size, _weights(work), work.rank)
        decoded = Timed(f"decode {policy[0]}", *policy[1:], sequences)
        step = self._price(decoded, work.tokens, grows=False)
        prompts = self._price(Timed(f"prefill {policy[0]}", *policy[1:], sequences * work.prompt))
        taken = 3600 * (step.measured + step.estimated + prompts.measured + prompts.estimated)
        repeats = next(count for count in itertools.count(1) if enough_runs([taken] * count))
        warm_up = self._price(decoded, min(work.tokens, WARM_UP), grows=False)
        return total([warm_up, prompts] + [step, prompts, prompts] * repeats)

    def _price(self, piece: Timed, times: int = 1, grows: bool = True) -> Hours:
        """The hours of a piece of work that is done so many times.

        The GPU's own kernels ("decode native") stand in for others ("decode native-portable") without a point.
        """
        alike = self._alike(piece.what) or self._alike(piece.what.partition("-")[0])
        if not alike:
            return _once(times * UNKNOWN * _parameters(piece.size) / _parameters("7B"), measured=False)
        nearest = min(alike, key=lambda known: _distance(known, piece))
        seconds = times * nearest.seconds * _parameters(piece.size) / _parameters(nearest.size)
        same = (nearest.what, nearest.size, nearest.weights) == (piece.what, piece.size, piece.weights)
        return _once(seconds * piece.amount / nearest.amount if grows else seconds, same)

    def _alike(self, what: str) -> list[Timed]:
        """The committed pieces of some work, such as "decode native-portable"."""
        return [known for known in self._known if known.what == what]


def _weights(work: Work | Decoding) -> str:
    return weights_name(work.weights, pack_delta_nets=work.pack_delta_nets)


def _once(seconds: float, measured: bool) -> Hours:
    return Hours(measured=seconds / 3600) if measured else Hours(estimated=seconds / 3600)


def _distance(known: Timed, piece: Timed) -> tuple[float, ...]:
    stands_in = known.weights in (STAND_IN.get(piece.weights), piece.weights.partition("-")[0])
    return (
        0 if known.weights == piece.weights else 1 if stands_in else 2,
        abs(math.log(_parameters(known.size) / _parameters(piece.size))),
        abs(math.log(known.amount / piece.amount)),
        abs(known.rank - piece.rank),
    )


def _parameters(size: str) -> int:
    """The elements of the projections that a token takes, and of the head."""
    shape = shape_of(size)
    return shape.products + shape.vocabulary * shape.hidden


def _whole(job: PointJob) -> tuple[list[Timed], int, str]:
    """The pieces of work that a job repeats with a warm-up, how often it does each, and the engine."""
    if isinstance(job, PromptsJob):
        asked = job.work
        policy = (asked.size, asked.weights, asked.rank)
        calls = [Timed("prompts", *policy, prompts * each) for prompts, each in job.points]
        return calls, 1 + job.repeats, "native"
    assert isinstance(job, RolloutMixJob)
    mix = job.work
    piece = Timed(f"mix {mix.engine}", mix.size, mix.weights, mix.rank, mix.prompts * mix.group)
    return [piece], 1 + mix.repeats, mix.engine


def _pieces(file: Path) -> Iterator[Timed]:
    """The times in a committed file; a point that failed has none."""
    kind = read(Kind, file).bench
    if kind == "decode":
        yield from _decoded(read(DecodeResult, file))
    elif kind == "prompts":
        called = read(PromptsResult, file)
        policy = (called.size, called.weights, called.rank)
        for call in called.points:
            if call.samples:
                yield Timed("prompts", *policy, call.prompts * call.tokens, median(call.samples))
    elif kind == "rollout_mix":
        mix = read(RolloutMixResult, file)
        if mix.runs:
            work = mix.work
            seconds = median(run.seconds for run in mix.runs)
            yield Timed(f"mix {work.engine}", work.size, work.weights, work.rank, work.prompts * work.group, seconds)
    else:
        step = read(GrpoStepResult, file)
        if step.steps:
            asked = step.work
            system = "trl" if step.system.startswith("TRL") else "qerl"
            tokens = asked.prompts * asked.group * (asked.prompt_tokens + asked.completion_tokens)
            seconds = median(one.update for one in step.steps)
            yield Timed(f"update {system}", asked.size, asked.weights_name, asked.rank, tokens, seconds)


def _decoded(result: DecodeResult) -> Iterator[Timed]:
    policy = (result.size, result.weights_name, result.rank)
    for point in result.points:
        if point.samples and point.prompt_seconds is not None:
            count = point.sequences
            yield Timed(f"decode {result.serving}", *policy, count, count / median(point.samples))
            yield Timed(f"prefill {result.serving}", *policy, count * result.prompt, point.prompt_seconds)
