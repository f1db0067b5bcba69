"""Prompts in one row of tokens, with what the blocks need to know about them, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from torch import Tensor

from qerl.kernels.packed_sequences import Packing

#: Queries of a prompt that one program of attention serves.
QUERY_BLOCK = 128


@dataclass(frozen=True)
class PromptRow:
    """`n` tokens of one prompt behind the other; padding, where there is some, is a prompt of its own at the end."""

    ids: Tensor  # [n] int32
    positions: Tensor  # [n] int32, of each token in its prompt
    places: Tensor  # [n] int32, where the cache has it: page * PAGE + place in the page
    last: Tensor  # [prompts] int32, the last token of each prompt; 0 for prompts that fill up a graph
    blocks: Tensor  # [blocks, 3] int32, of queries: the first one, where its prompt begins, and where it ends
    #: The prompts' lengths, for attention prompt by prompt; None where it must not depend on the host.
    packing: Packing | None

    @classmethod
    def of(cls, row: Tensor, tokens: int, prompts: int, packing: Packing | None) -> PromptRow:
        """Views of what `pack` made of `tokens` and `prompts`, those that fill up a graph included."""
        parts = [tokens, tokens, tokens, prompts]
        ids, positions, places, last, blocks = row.split([*parts, len(row) - sum(parts)])
        return cls(ids, positions, places, last, blocks.view(-1, 3), packing)


def pack(
    prompts: Sequence[Sequence[int]], pages: Sequence[Sequence[int]], page: int, tokens: int, most: int | None = None
) -> np.ndarray:
    """The fields of a `PromptRow` of `tokens`, one behind the other, int32.

    `page`: tokens of a page. Padding is at position 0 and goes to page 0, which is nobody's. With `most` prompts at
    most the numbers of prompts and of blocks don't depend on the prompts: empty ones fill them up.
    """
    ends = list(accumulate([len(prompt) for prompt in prompts], initial=0))
    row = np.zeros((3, tokens), dtype=np.int32)
    for start, prompt, page_numbers in zip(ends[:-1], prompts, pages, strict=True):
        position = np.arange(len(prompt))
        place = np.asarray(page_numbers)[position // page] * page + position % page
        row[:, start : start + len(prompt)] = prompt, position, place
    blocks = _blocks([*ends, tokens] if ends[-1] < tokens else ends)
    if most is not None:
        blocks += [(0, 0, 0)] * (tokens // QUERY_BLOCK + most + 1 - len(blocks))
    last = np.zeros(most or len(prompts), dtype=np.int32)
    last[: len(prompts)] = np.array(ends[1:]) - 1
    return np.concatenate([row.ravel(), last, np.array(blocks, dtype=np.int32).ravel()])


def _blocks(ends: Sequence[int]) -> list[tuple[int, int, int]]:
    """Blocks of queries of prompts between `ends`; those with the most keys start first."""
    blocks = [(start, first, end) for first, end in pairwise(ends) for start in range(first, end, QUERY_BLOCK)]
    return sorted(blocks, key=lambda block: block[1] - block[0])
