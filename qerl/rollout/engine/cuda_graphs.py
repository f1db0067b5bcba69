"""Decode steps of any batch size, as CUDA graphs on a GPU and eagerly elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from qerl.kernels.decode_state import DecodeState, SamplingState
from qerl.kernels.delta_state import DeltaStates
from qerl.kernels.graphs import captured
from qerl.kernels.kv_cache import KVCache
from qerl.kernels.w4a16.variants import padded_rows
from qerl.rollout.engine.decoder import Decoder
from qerl.rollout.engine.transfer import upload

_SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)


def bucket_of(rows: int) -> int:
    """The least batch size of a graph that has room for `rows`; few sizes keep graphs few.

    Beyond `_SMALL`, only sizes at which the decode product needs more row blocks have a graph. Products take most of
    such a step, and sizes between take as long (docs/lab/rollouts.md).
    """
    return next((size for size in _SMALL if size >= rows), padded_rows(rows))


class DecodeGraphs:
    """Runs decode steps of slots; each (bucket, splits, truncated, replayed) is captured at its first use.

    `whole`: every step has the batch size of all slots, so that no product depends on the number of active sequences.
    `memory`: the memory pool of the graphs, None without graphs. `states` are those of delta nets.
    """

    def __init__(
        self,
        decoder: Decoder,
        state: DecodeState,
        cache: KVCache,
        sampling: SamplingState,
        whole: bool,
        memory: Any,
        states: DeltaStates | None = None,
    ) -> None:
        self._decoder, self._states = decoder, states
        self._whole = whole
        self._state, self._cache, self._sampling = state, cache, sampling
        self._rows = torch.full((bucket_of(state.count),), state.count, dtype=torch.int32, device=decoder.device)
        self._captured: dict[tuple[int, int, bool, bool], Callable[[], None]] = {}
        self._memory = memory

    @torch.no_grad()
    def run(self, chosen: Sequence[int], count: int, splits: int, truncated: bool, replayed: bool) -> None:
        """Launch `count` decode steps of the slots `chosen`, without waiting for the device."""
        if not count:
            return
        bucket = bucket_of(self._state.count if self._whole else len(chosen))
        step = self._step(bucket, splits, truncated, replayed)
        padded = [*chosen, *[self._state.count] * (bucket - len(chosen))]
        self._rows[:bucket].copy_(upload(padded, torch.int32, self._rows.device))
        for _ in range(count):
            step()

    def _step(self, bucket: int, splits: int, truncated: bool, replayed: bool) -> Callable[[], None]:
        key = bucket, splits, truncated, replayed
        if key not in self._captured:
            rows = self._rows[:bucket]
            step, inputs = self._decoder.step, (rows, self._state, self._cache, self._sampling)
            eager: Callable[[], None] = partial(step, *inputs, splits, truncated, replayed, states=self._states)
            if self._memory is not None:
                rows.fill_(self._state.count)  # capturing runs the step, so it must touch only the idle slot
                eager = captured(eager, self._memory)
            self._captured[key] = eager
        return self._captured[key]
