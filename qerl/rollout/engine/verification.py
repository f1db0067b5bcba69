"""Steps that verify drafts: several rows a sequence, of which those with right tokens count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qerl.kernels.decode_state import DecodeState, SamplingState
from qerl.kernels.draft_state import DraftRows, DraftSource, DraftTotals, Guesses
from qerl.kernels.graphs import captured
from qerl.kernels.kv_cache import KVCache
from qerl.rollout.engine.decoder import Decoder
from qerl.rollout.engine.drafting import allotted, expected, ranked
from qerl.rollout.engine.drafts import TextLayout, Texts
from qerl.rollout.engine.speculation import DraftCount, DraftCounts
from qerl.rollout.engine.transfer import upload


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
