"""Speculation: which drafts a step verifies, by what its rows cost and how often drafts like these were right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from qerl.kernels.decode_state import IDLE
from qerl.kernels.w4a16.variants import padded_rows
from qerl.rollout.engine.drafts import MOST_DRAFTED, Draft, DraftSource, EarlierCompletions, GroupDrafts

#: The most rows of a step that verifies drafts. Beyond it, operations bound a step, and a row costs its full share.
MOST_ROWS = 128
#: Rows with which a step takes twice as long as its weights alone take: 1.8 ms at 1 sequence, 3.4 at 64, 5.3 at 128
#: (7B in NVFP4 on an H200, docs/kernels.md). Decisions by a clock would make roundings depend on the machine's load.
_DOUBLING_ROWS = 60
#: What a verification costs beyond its rows, in the same unit, and what each of its sequences adds: the host waits,
#: drafts and launches, while the device is idle (0.2 ms and 35 µs, docs/lab/rollouts.md).
_VERIFICATION, _OF_SEQUENCE = 0.12, 0.02
#: The first and the longest pause, in plain steps, after a look at the drafts that found none to pay.
_PAUSES = (1, 128)
#: Of so many tested tokens so many are taken to be right before any is tested.
_PRIOR_RIGHT, _PRIOR_TESTED = 2, 3

#: Drafts of one source and one length of suffix are right about equally often.
_Kind: TypeAlias = tuple[DraftSource, int]


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
    sources: dict[DraftSource, DraftCount] = field(default_factory=lambda: defaultdict(DraftCount))


@dataclass(frozen=True)
class Feed:
    """The rows of a step that verifies drafts. Those of a sequence follow each other: its last token, then its draft.

    `rows` [3, n] int64 has for each row its slot, its place among the rows of its sequence, and the drafted token.
    """

    rows: np.ndarray
    drafts: list[Draft | None]
    #: The number of tokens of each draft that the rows have.
    verified: list[int]


@dataclass(frozen=True)
class Verified:
    """The tokens that a step gave a sequence, and whether they ended it."""

    tokens: list[int]
    logprobs: list[float]
    ended: bool


def _kind(draft: Draft) -> _Kind:
    return draft.source, draft.suffix


class Speculation:
    """Drafts of one call of `generate`. Its decisions follow from tokens alone, so that a rollout can be repeated.

    `step_rows`: the number of rows that every step computes anyhow, None if it computes no more than it needs.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        stops: Collection[int],
        earlier: EarlierCompletions,
        step_rows: int | None,
    ) -> None:
        self._prompts, self._count, self._stops, self._earlier = prompts, count, stops, earlier
        self._most = step_rows or MOST_ROWS
        self._costs = [1 + padded_rows(step_rows or max(rows, 1)) / _DOUBLING_ROWS for rows in range(self._most + 1)]
        #: Numbers of rows that a step may have, of those that cost the same the largest.
        self._sizes = [rows for rows, cost in enumerate(self._costs) if cost not in self._costs[rows + 1 :]]
        self._groups: dict[int, GroupDrafts] = {}
        self._right: dict[_Kind, int] = defaultdict(int)
        self._tested: dict[_Kind, int] = defaultdict(int)
        self._pause, self._paused = _PAUSES[0], 0
        self.counts = DraftCounts()

    def know(self, index: int, tokens: Sequence[int]) -> None:
        """State all tokens so far of the completion with this index."""
        group, completion = divmod(index, self._count)
        if group not in self._groups:
            prompt = self._prompts[group]
            self._groups[group] = GroupDrafts(prompt, self._earlier.of(prompt))
        self._groups[group].know(completion, tokens, self._stops)

    def tries(self, sequences: int) -> bool:
        """Whether drafts for this many sequences are worth a look; without one, a step costs what it would."""
        return not self._paused and 0 < sequences < self._most

    def plain_steps(self, most: int) -> int:
        """How many of `most` plain steps to run before the next look at the drafts."""
        steps = min(most, self._paused or most)
        self._paused = max(self._paused - steps, 0)
        return steps

    def feed(self, sequences: Sequence[tuple[int, int, int]]) -> Feed | None:
        """The rows to verify for sequences given as (index, slot, tokens that may still be drawn); None if no draft is
        expected to pay. All tokens of the sequences are known.
        """
        drafts = [self._draft(index, left) for index, _, left in sequences]
        taken = self._taken(drafts)
        if not sum(taken):
            self._paused, self._pause = self._pause, min(2 * self._pause, _PAUSES[1])
            return None
        self._pause = _PAUSES[0]
        slots: list[int] = []
        ahead: list[int] = []
        tokens: list[int] = []
        for (_, slot, _), draft, length in zip(sequences, drafts, taken, strict=True):
            slots += [slot] * (1 + length)
            ahead += range(1 + length)
            tokens += [0, *draft.tokens[:length]] if draft else [0]
        return Feed(np.array([slots, ahead, tokens], dtype=np.int64), drafts, taken)

    def _draft(self, index: int, left: int) -> Draft | None:
        group, completion = divmod(index, self._count)
        return self._groups[group].draft(completion, min(MOST_DRAFTED, left - 1))

    def _taken(self, drafts: Sequence[Draft | None]) -> list[int]:
        """The number of tokens of each draft to verify: those likeliest to be right, as many as give the most tokens
        in the least time.
        """
        alike: dict[tuple[float, int, _Kind], list[int]] = defaultdict(list)
        chances = {_kind(draft): self._chance(_kind(draft)) for draft in drafts if draft}
        for place, draft in enumerate(drafts):
            if draft:
                chance = chances[_kind(draft)]
                for depth in range(1, 1 + len(draft.tokens)):
                    alike[-(chance**depth), depth, _kind(draft)].append(place)
        places = [place for key in sorted(alike) for place in alike[key]]
        gains = list(accumulate((-key[0] for key in sorted(alike) for _ in alike[key]), initial=0.0))
        sequences, taken = len(drafts), [0] * len(drafts)
        best, most = sequences / self._costs[sequences], 0
        extra_cost = _VERIFICATION + _OF_SEQUENCE * sequences
        for rows in [rows for rows in self._sizes if rows > sequences]:
            extra = min(rows - sequences, len(places))
            rate = (sequences + gains[extra]) / (self._costs[sequences + extra] + extra_cost)
            if rate > best:
                best, most = rate, extra
        for place in places[:most]:
            taken[place] += 1
        return taken

    def _chance(self, kind: _Kind) -> float:
        """How often a drafted token of this kind was right where the tokens before it were."""
        return (self._right[kind] + _PRIOR_RIGHT) / (self._tested[kind] + _PRIOR_TESTED)

    def settle(self, feed: Feed, outcome: np.ndarray) -> list[Verified]:
        """What a step gave each sequence. `outcome` [n, 4] int32 has for each row whether its token counts, the token,
        the bits of its log-probability, and the position after it.
        """
        counts, tokens, bits, position = np.ascontiguousarray(outcome.T)
        token_list, logprobs = tokens.tolist(), bits.view(np.float32).tolist()
        given, idle = np.append(0, counts.cumsum()).tolist(), (position == IDLE).tolist()
        settled, start = [], 0
        for draft, verified in zip(feed.drafts, feed.verified, strict=True):
            end = start + given[start + 1 + verified] - given[start]
            settled.append(Verified(token_list[start:end], logprobs[start:end], end == start or idle[end - 1]))
            self._count_tokens(draft, verified, token_list[start:end])
            start += 1 + verified
        self.counts.steps += 1
        self.counts.sequences += len(settled)
        self.counts.rows += len(outcome)
        return settled

    def _count_tokens(self, draft: Draft | None, verified: int, tokens: Sequence[int]) -> None:
        self.counts.tokens += len(tokens)
        if draft is None or not verified or not tokens:
            return
        right = len(tokens) - 1
        failed = right < verified and tokens[right] != draft.tokens[right]
        self._right[_kind(draft)] += right
        self._tested[_kind(draft)] += right + failed
        source = self.counts.sources[draft.source]
        source.verified += verified
        source.accepted += right
