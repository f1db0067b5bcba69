"""Steps that verify drafts: several rows a sequence, of which those with right tokens count."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qerl.kernels.decode_state import IDLE, DecodeState, SamplingState
from qerl.kernels.graphs import captured
from qerl.rollout.engine.cuda_graphs import bucket_of
from qerl.rollout.engine.decoder import Decoder
from qerl.rollout.engine.transfer import Download, upload


class VerifyGraphs:
    """Runs steps of up to `rows` rows; each (bucket, splits, truncated, replayed) is captured at its first use.

    A row is decoded as if it were a sequence of its own. It feeds a token to the sequence's pages, as far ahead as it
    stands in the draft, and draws the token that plain steps would draw there. Keys and values of wrong tokens are
    overwritten by later steps, before anything reads them. `whole` and `memory` are as in `DecodeGraphs`.
    """

    def __init__(
        self,
        decoder: Decoder,
        state: DecodeState,
        cache: Tensor,
        sampling: SamplingState,
        rows: int,
        whole: bool,
        memory: Any,
    ) -> None:
        size, device = bucket_of(rows), decoder.device
        self._decoder, self._state, self._cache, self._sampling = decoder, state, cache, sampling
        self._least = size if whole else 1
        self._rows = DecodeState.empty(size, state.tokens.shape[1], state.pages.shape[1], device)
        self._numbers = torch.arange(size, dtype=torch.int32, device=device)
        self._fed = torch.zeros(3, size, dtype=torch.int64, device=device)
        self._outcome = torch.zeros(size, 4, dtype=torch.int32, device=device)
        self._captured: dict[tuple[int, int, bool, bool], Callable[[], None]] = {}
        self._memory = memory

    @torch.no_grad()
    def run(self, rows: np.ndarray, splits: int, truncated: bool, replayed: bool) -> Download:
        """Launch a step of `rows` [3, n], as `Feed` has them. Returns its outcome [n, 4], as `Speculation.settle` reads
        it, and doesn't wait for the device.
        """
        count = rows.shape[1]
        bucket = bucket_of(max(count, self._least))
        padded = np.zeros((3, bucket), dtype=np.int64)
        padded[0, count:] = self._state.count
        padded[:, :count] = rows
        step = self._step(bucket, splits, truncated, replayed)
        self._fed[:, :bucket].copy_(upload(padded, torch.int64, self._fed.device))
        step()
        return Download.of(self._outcome[:count])

    def _step(self, bucket: int, splits: int, truncated: bool, replayed: bool) -> Callable[[], None]:
        key = bucket, splits, truncated, replayed
        if key not in self._captured:
            eager: Callable[[], None] = partial(self._verify, bucket, splits, truncated, replayed)
            if self._memory is not None:
                self._fed[0].fill_(self._state.count)  # capturing runs the step, so it must touch only the idle slot
                self._fed[1].zero_()
                eager = captured(eager, self._memory)
            self._captured[key] = eager
        return self._captured[key]

    def _verify(self, bucket: int, splits: int, truncated: bool, replayed: bool) -> None:
        slots, ahead, drafted = self._fed[:, :bucket]
        live = self._spread(slots, ahead, drafted, replayed)
        self._decoder.step(
            self._numbers[:bucket], self._rows, self._cache, self._sampling, splits, truncated, replayed, drafted=True
        )
        self._settle(slots, ahead, drafted, live)

    def _spread(self, slots: Tensor, ahead: Tensor, drafted: Tensor, replayed: bool) -> Tensor:
        """Give each row its sequence's state, moved ahead; returns which rows have a sequence [bucket] bool."""
        state, rows, size = self._state, self._rows, len(slots)
        position = state.position[slots]
        live = position != IDLE
        rows.position[:size] = torch.where(live, position + ahead, IDLE).int()
        rows.drawn[:size] = (state.drawn[slots] + ahead).int()
        rows.token[:size] = torch.where(ahead > 0, drafted, state.token[slots])
        rows.limit[:size] = state.limit[slots]
        rows.sequence[:size] = state.sequence[slots]
        rows.pages[:size] = state.pages[slots]
        if replayed:
            rows.tokens[:size] = state.tokens[slots]
        return live

    def _settle(self, slots: Tensor, ahead: Tensor, drafted: Tensor, live: Tensor) -> None:
        """Advance the sequences by their rows up to the first whose token the row before it didn't draw."""
        state, rows, size, idle = self._state, self._rows, len(slots), self._state.count
        token, position = rows.token[:size], rows.position[:size]
        number = torch.where(live, state.drawn[slots] + ahead, 0).long()
        places = self._numbers[:size].long()
        logprob = rows.logprobs[places, number]
        wrong = (ahead > 0) & ((token.roll(1) != drafted) | (position.roll(1) == IDLE))
        wrongs = wrong.cumsum(0)
        counts = live & (wrongs == wrongs[places - ahead])
        last = counts & ~(counts.roll(-1) & (ahead.roll(-1) > 0))
        self._outcome[:size] = torch.stack([counts.int(), token.int(), logprob.view(torch.int32), position], 1)
        slot = torch.where(counts, slots, idle)
        state.tokens[slot, number] = token.int()
        state.logprobs[slot, number] = logprob
        slot = torch.where(last, slots, idle)
        state.position[slot] = torch.where(last, position, IDLE)
        state.drawn[slot] = torch.where(last, rows.drawn[:size], 0)
        state.token[slot] = torch.where(last, token, 0)
