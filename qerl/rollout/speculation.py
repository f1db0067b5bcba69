"""Speculative decoding: drafts from earlier texts, the steps that verify them, and their number of rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qerl.kernels.cuda.w4a16 import padded_rows
from qerl.kernels.state import (
    LONGEST_MATCH,
    NO_TOKEN,
    DecodeState,
    DraftRows,
    DraftSource,
    DraftTotals,
    Guesses,
    KVCache,
    SamplingState,
    TextState,
    captured,
)
from qerl.rollout.decoder import Decoder, upload

# Texts on the device, from which drafts come: guesses of a completion's next tokens.
#
# They are the prompt, the completion itself, its siblings, and completions of the same prompt from earlier calls. The
# texts of a group lie one behind the other, so that one pass over them finds where a completion's last tokens occurred.

#: Bounds of the completions that are kept for later calls: of each prompt, and tokens of all prompts.
_KEPT, _KEPT_TOKENS = 16, 2**23


class EarlierCompletions:
    """Completions of earlier calls by prompt, such as those of earlier epochs; the oldest prompts are forgotten."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], deque[list[int]]] = {}
        self._tokens = 0

    def of(self, prompt: Sequence[int]) -> Sequence[list[int]]:
        """The kept completions of a prompt, the oldest first."""
        return self._kept.get(tuple(prompt), ())

    def add(self, prompt: Sequence[int], completions: Sequence[list[int]]) -> None:
        """Keep completions of a prompt, without their stop tokens."""
        kept = self._kept.pop(tuple(prompt), None) or deque(maxlen=_KEPT)
        self._tokens -= sum(map(len, kept))
        kept.extend(completions)
        self._tokens += sum(map(len, kept))
        self._kept[tuple(prompt)] = kept  # at the end: dictionaries keep the order of insertion
        while self._tokens > _KEPT_TOKENS:
            self._tokens -= sum(map(len, self._kept.pop(next(iter(self._kept)))))


@dataclass(frozen=True)
class TextLayout:
    """The texts of a call's groups as they lie on the device, before a token is drawn.

    `tokens` [n] int32 have NO_TOKEN where tokens are to come, and LONGEST_MATCH times between texts. `groups`
    [prompts, 4] have for each group the places of its first text (the prompt), of earlier completions and of
    completions, and its end. A completion begins every `stride` places, behind the last tokens of its prompt.
    """

    tokens: np.ndarray
    groups: np.ndarray
    stride: int
    max_tokens: int

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], count: int, max_tokens: int, earlier: EarlierCompletions
    ) -> TextLayout:
        """Lay out the texts of `count` completions of each prompt."""
        gap, stride = [NO_TOKEN] * LONGEST_MATCH, 2 * LONGEST_MATCH + max_tokens
        parts, groups, end = [np.array(gap)], [], len(gap)  # place 0 is written to and never read
        for prompt in prompts:
            before = [*gap, *prompt][-LONGEST_MATCH:]
            kept = [token for tokens in earlier.of(prompt) for token in (*before, *tokens, *gap)]
            blocks = np.full((count, stride), NO_TOKEN)
            blocks[:, :LONGEST_MATCH] = before
            group = [np.array([*gap, *prompt, *gap]), np.array(kept), blocks.ravel()]
            groups.append([end, *(end + np.cumsum([len(part) for part in group]))])
            parts += group
            end = groups[-1][-1]
        tokens = np.concatenate([*parts, gap]).astype(np.int32)
        return cls(tokens, np.array(groups), stride, max_tokens)

    def places(self, group: int, completion: int) -> list[int]:
        """The places of a completion's group, as `groups` has them, and that of its own first token."""
        first = self.groups[group, 2] + completion * self.stride + LONGEST_MATCH
        return [*self.groups[group].tolist(), int(first)]


class Texts:
    """The texts of a call on the device, for up to `size` tokens; steps read and extend `state`."""

    def __init__(self, size: int, slots: int, device: torch.device) -> None:
        self.state = TextState.empty(size, slots, device)
        self._layout: TextLayout | None = None

    @property
    def size(self) -> int:
        """The number of tokens for which there is room."""
        return len(self.state.tokens)

    def fill(self, layout: TextLayout) -> None:
        """Replace all texts; no slot has one then."""
        self._layout = layout
        self.state.tokens[: len(layout.tokens)].copy_(upload(layout.tokens, torch.int32, self.state.tokens.device))
        self.state.places.zero_()
        self.state.most.fill_(layout.max_tokens)

    def enter(self, slots: Tensor, completions: Sequence[tuple[int, int]]) -> None:
        """State which completions, given by group and number, are in `slots`."""
        assert self._layout is not None
        places = [self._layout.places(*completion) for completion in completions]
        self.state.places[:, slots] = upload(places, torch.int64, slots.device).T


# The rows of a step that verifies drafts: which tokens of the guesses get one, and how many would be right.


def ranked(guesses: Guesses) -> tuple[Tensor, Tensor]:
    """The places [B * MOST_DRAFTED] of all guessed tokens by their chance of being right, the likeliest first, and the
    chances in this order, 0 where a draft has no token.
    """
    ordered = guesses.chances.flatten().sort(descending=True, stable=True)
    return ordered.indices, ordered.values


def allotted(guesses: Guesses, order: Tensor, chances: Tensor, rows: int) -> Tensor:
    """For each slot the number of its last row, plus 1 [B] int64: each sequence gets one of the `rows`, and the
    likeliest tokens get the others. `order` and `chances` come from `ranked`; there are at most `rows` sequences.
    """
    free = rows - guesses.live.sum()
    taken = torch.zeros_like(chances, dtype=torch.bool)
    # A token is never likelier than the one before it, and of equals the one before comes first.
    taken[order] = (torch.arange(len(order), device=order.device) < free) & (chances > 0)
    return (guesses.live + taken.view(len(guesses.live), -1).sum(1)).cumsum(0)


def expected(guesses: Guesses, chances: Tensor, sizes: Tensor) -> Tensor:
    """How many guessed tokens would be right in a step of each size [sizes] float32. `chances` come from `ranked`."""
    last = sizes - 1 - guesses.live.sum()
    return chances.cumsum(0)[last.clamp(0, len(chances) - 1)] * (last >= 0)


# Speculation: when steps verify drafts, and with how many rows, by what rows cost and how many drafts are right.

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


# Steps that verify drafts: several rows a sequence, of which those with right tokens count.


class VerifyGraphs:
    """Runs steps of as many rows as `sizes` say; each (rows, splits, truncated, replayed) is captured at its first use.

    Nothing in them waits for the host, so that steps follow each other. A row is decoded as if it were a sequence of
    its own. It feeds a token to the sequence's pages, as far ahead as it stands in the draft, and draws the token that
    plain steps would draw there. Keys and values of wrong tokens are overwritten by later steps, before anything reads
    them. `memory` is as in `DecodeGraphs`.
    """

    def __init__(
        self,
        decoder: Decoder,
        state: DecodeState,
        cache: KVCache,
        sampling: SamplingState,
        texts: Texts,
        sizes: Sequence[int],
        memory: Any,
    ) -> None:
        size, device = sizes[-1], decoder.device
        self.texts = texts
        self._decoder, self._state, self._cache, self._sampling = decoder, state, cache, sampling
        self._sizes, self._free = list(sizes), torch.tensor(sizes, device=device)
        self._rows = DraftRows.empty(size, state.tokens.shape[1], state.pages.shape[1], device)
        self._numbers = torch.arange(size, dtype=torch.int32, device=device)
        self._slots = torch.full((size,), state.count, dtype=torch.int64, device=device)
        self._totals = DraftTotals.empty(device)
        self._steps = 0
        #: Searches for drafts that were launched, and the sums over these of the drafted tokens that are expected to be
        #: right in a step of each size, [sizes] float32.
        self.searches = 0
        self.expected = torch.zeros(len(sizes), dtype=torch.float32, device=device)
        self._captured: dict[tuple[Any, ...], Callable[[], Any]] = {}
        self._memory = memory

    def begin(self, layout: TextLayout) -> None:
        """Start a call with these texts and without counts."""
        self.texts.fill(layout)
        self._steps = self.searches = 0
        for counts in (self._totals.tried, self._totals.steps, self.expected):
            counts.zero_()

    @torch.no_grad()
    def run(self, chosen: Sequence[int], rows: int, splits: int, truncated: bool, replayed: bool) -> None:
        """Launch a step of `rows` rows for the slots `chosen`, which it has at most, without waiting for the device."""
        step = self._graph(
            (rows, splits, truncated, replayed), partial(self._verify, rows, splits, truncated, replayed)
        )
        self._choose(chosen, rows)
        step()
        self._steps += 1
        self.searches += 1

    @torch.no_grad()
    def look(self, chosen: Sequence[int]) -> None:
        """Find drafts for the slots `chosen`, and only add to `expected`; doesn't wait for the device."""
        size = next(size for size in self._sizes if size >= len(chosen))
        look = self._graph((size,), lambda: self._guess(size))
        self._choose(chosen, size)
        look()
        self.searches += 1

    def counts(self) -> DraftCounts:
        """Counts since `begin`; waits for the device."""
        tried = self._totals.tried.view(len(DraftSource), -1, 3).sum(1).tolist()
        counts = {
            source: DraftCount(verified, right)
            for source, (verified, right, _) in zip(DraftSource, tried, strict=True)
            if verified
        }
        sequences, rows, tokens = self._totals.steps.tolist()
        return DraftCounts(self._steps, sequences, rows, tokens, counts)

    def _choose(self, chosen: Sequence[int], size: int) -> None:
        padded = [*chosen, *[self._state.count] * (size - len(chosen))]
        self._slots[:size].copy_(upload(padded, torch.int64, self._slots.device))

    def _graph(self, key: tuple[Any, ...], eager: Callable[[], Any]) -> Callable[[], Any]:
        if key not in self._captured:
            if self._memory is not None:
                self._slots.fill_(self._state.count)  # capturing runs the step, so it must touch only the idle slot
                eager = captured(eager, self._memory)
            self._captured[key] = eager
        return self._captured[key]

    def _verify(self, rows: int, splits: int, truncated: bool, replayed: bool) -> None:
        ops, decoder = self._decoder.operations, self._decoder
        guesses, order, chances = self._guess(rows)
        ops.spread(guesses, allotted(guesses, order, chances, rows), self._state, self._rows, rows, replayed)
        numbers, state = self._numbers[:rows], self._rows.state
        decoder.step(numbers, state, self._cache, self._sampling, splits, truncated, replayed, drafted=True)
        ops.settle(self._rows, self._state, rows, self._totals)

    def _guess(self, size: int) -> tuple[Guesses, Tensor, Tensor]:
        """Drafts for the first `size` chosen slots, and their tokens as `ranked` has them; adds to `expected`."""
        guess = self._decoder.operations.guess
        guesses = guess(self._slots[:size], self.texts.state, self._state, self._sampling, self._totals)
        order, chances = ranked(guesses)
        self.expected += expected(guesses, chances, self._free)
        return guesses, order, chances
