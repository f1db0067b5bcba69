"""Speculation: when steps verify drafts, and with how many rows, by what rows cost and how many drafts are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qerl.kernels.draft_state import DraftSource
from qerl.kernels.w4a16.variants import padded_rows

#: The most rows of a step that verifies drafts. Beyond it, operations bound a step, and a row costs its full share.
MOST_ROWS = 128
#: Rows with which a step takes twice as long as its weights alone take: 1.8 ms at 1 sequence, 3.4 at 64, 5.3 at 128
#: (7B in NVFP4 on an H200, docs/kernels.md). Decisions by a clock would make roundings depend on the machine's load.
_DOUBLING_ROWS = 60
#: What a verification costs beyond its rows, in the same unit: launches that append before attention, and those that
#: find and judge drafts (0.18 ms, docs/lab/rollouts.md).
_VERIFICATION = 0.1
#: How many times the tokens a second of plain steps have to be expected: chances are estimates, and read late.
_WORTHWHILE = 1.05
#: The first and the longest pause, in plain steps, after drafts weren't expected to pay.
_PAUSES = (2, 128)
#: Weight of the latest search in the running mean of the tokens that are expected to be right.
_LATEST = 0.25


@dataclass
class DraftCount:
    """Tokens that were verified, and those of them that were right."""

    verified: int = 0
    accepted: int = 0


@dataclass
class DraftCounts:
    """Verifications of a rollout: `sequences` is the sum of the steps' sequences, `rows` that of their rows without
    padding, and `tokens` are all tokens that they gave.
    """

    steps: int = 0
    sequences: int = 0
    rows: int = 0
    tokens: int = 0
    sources: dict[DraftSource, DraftCount] = field(default_factory=dict)


def _costs(step_rows: int | None) -> list[float]:
    """What steps of 0, 1, 2 … rows cost, in units of a step's weights."""
    most = step_rows or MOST_ROWS
    return [1 + padded_rows(step_rows or max(rows, 1)) / _DOUBLING_ROWS for rows in range(most + 1)]


def step_sizes(step_rows: int | None) -> list[int]:
    """Numbers of rows that a step may have: of those that cost the same the largest. `step_rows`: the rows that every
    step computes anyhow, None if it computes no more than it needs.
    """
    costs = _costs(step_rows)
    return [rows for rows, cost in enumerate(costs) if cost not in costs[rows + 1 :]]


class Speculation:
    """Decisions of one call of `generate`. They follow from tokens alone, so that a rollout can be repeated.

    What the device found is read some steps later, so they are taken by a running mean.
    """

    def __init__(self, step_rows: int | None) -> None:
        self._costs, self._sizes = _costs(step_rows), step_sizes(step_rows)
        self._expected: list[float] | None = None
        self._sums, self._searches = [0.0] * len(self._sizes), 0
        self._pause, self._paused = _PAUSES[0], 0

    def tries(self, sequences: int) -> bool:
        """Whether drafts for this many sequences are worth a search; without one, a step costs what it would."""
        return not self._paused and 0 < sequences < self._sizes[-1]

    def learn(self, searches: int, sums: Sequence[float]) -> None:
        """State how many searches there were, and the sums over these of the expected right tokens of each size."""
        new, self._searches = searches - self._searches, searches
        if not new or self._paused:
            self._sums = list(sums)
            return
        latest = [(after - before) / new for before, after in zip(self._sums, sums, strict=True)]
        self._sums = list(sums)
        mean = self._expected or latest
        self._expected = [old + _LATEST * (value - old) for old, value in zip(mean, latest, strict=True)]

    def rows(self, sequences: int) -> int:
        """The rows of the next step if it is to verify drafts, 0 if it is to be plain."""
        if self._expected is None or not self.tries(sequences):
            return 0
        best, rows = _WORTHWHILE * sequences / self._costs[sequences], 0
        for size, right in zip(self._sizes, self._expected, strict=True):
            rate = (sequences + right) / (self._costs[size] + _VERIFICATION)
            if size > sequences and rate > best:
                best, rows = rate, size
        if rows:
            self._pause = _PAUSES[0]
        else:
            self._paused, self._pause = self._pause, min(2 * self._pause, _PAUSES[1])
            self._expected = None
        return rows

    def plain_steps(self, sequences: int, most: int) -> int:
        """How many plain steps to run before the next look: `most` where drafts can't pay, else one, so that drafts
        and free slots are noticed soon.
        """
        if sequences >= self._sizes[-1]:
            return most
        self._paused = max(self._paused - 1, 0)
        return 1
