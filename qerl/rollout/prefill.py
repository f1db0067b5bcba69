"""Prefill: prompts are packed into one row for the decoder's blocks, and their keys and values written to pages.

Up to 1,024 tokens, launching kernels takes longer than computing, so all launches are captured in CUDA graphs, one for
each of a few numbers of tokens. More tokens keep the GPU busy while the host launches the next products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qerl.kernels.packed_sequences import Packing
from qerl.kernels.state import PAGE, DeltaStates, GraphBySize, KVCache, PromptRow, pack
from qerl.rollout.decoder import Decoder, upload

#: Tokens of a graph, padding included.
BUCKETS = (32, 64, 128, 256, 384, 512, 768, 1024)
#: Prompts of a graph: attention starts thread blocks for as many, whether they have tokens or not.
MOST_PROMPTS = 32


def bucket_of(tokens: int, prompts: int) -> int | None:
    """The size of the smallest graph with room for `tokens` of `prompts`; None if there is none."""
    return next((size for size in BUCKETS if size >= tokens), None) if prompts <= MOST_PROMPTS else None


@dataclass(frozen=True)
class _Graph:
    """Replaying it computes `hidden` [MOST_PROMPTS, H], at each prompt's last token, from the prompts in `row`.

    `slots` [MOST_PROMPTS] are the rows of states that it writes.
    """

    row: Tensor
    slots: Tensor | None
    hidden: Tensor
    replay: Callable[[], None]


class Prefill:
    """Computes prompts into a cache; graphs are captured at their first use.

    `memory`: the memory pool of the graphs, None without graphs. `states` are those of delta nets.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, memory: Any, states: DeltaStates | None = None) -> None:
        self._decoder, self._cache, self._states = decoder, cache, states
        self._graphs: GraphBySize[_Graph] = GraphBySize(memory)
        # In float32 attention runs prompt by prompt, which needs lengths that a graph doesn't have.
        self._captures = memory is not None and decoder.dtype.itemsize == 2

    @torch.no_grad()
    def logits(self, prompts: Sequence[Sequence[int]], pages: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """Logits [prompts, V] after each prompt. Writes keys and values to the prompts' `pages` of the cache, states
        of delta nets to their `slots`, and does not wait for the device.
        """
        lengths, device = [len(prompt) for prompt in prompts], self._decoder.device
        tokens = sum(lengths)
        bucket = bucket_of(tokens, len(prompts)) if self._captures else None
        if bucket is None:
            row = upload(pack(prompts, pages, PAGE, tokens), torch.int32, device)
            packing = Packing.of(lengths, [None] * len(lengths), torch.device("cpu"))
            placed = PromptRow.of(row, tokens, len(prompts), packing, self._placed(slots, len(slots)))
            hidden = self._decoder.last_hidden(placed, self._cache, self._states)
        else:
            row = upload(pack(prompts, pages, PAGE, bucket, MOST_PROMPTS), torch.int32, device)
            placed_slots = self._placed(slots, MOST_PROMPTS)
            graph = self._graphs.at(bucket, lambda: self._capture(bucket, row.clone(), placed_slots))
            graph.row.copy_(row)
            if graph.slots is not None and placed_slots is not None:
                graph.slots.copy_(placed_slots)
            graph.replay()
            hidden = graph.hidden[: len(prompts)]
        return self._decoder.logits(hidden)

    def _placed(self, slots: Sequence[int], count: int) -> Tensor | None:
        """The slots on the device, with idle ones up to `count`; None without states."""
        if self._states is None:
            return None
        padded = [*slots, *[self._states.idle] * (count - len(slots))]
        return upload(padded, torch.int32, self._decoder.device)

    def _capture(self, bucket: int, row: Tensor, slots: Tensor | None) -> _Graph:
        prompts, width = PromptRow.of(row, bucket, MOST_PROMPTS, None, slots), self._decoder.width
        hidden = torch.empty(MOST_PROMPTS, width, dtype=self._decoder.dtype, device=self._decoder.device)

        def compute() -> None:
            hidden.copy_(self._decoder.last_hidden(prompts, self._cache, self._states))

        return _Graph(row, slots, hidden, self._graphs.captured(compute))
