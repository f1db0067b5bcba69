"""Prompts packed in one row of tokens on the device, with positions, places in the cache and blocks of queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from torch import Tensor
from torch.nn.functional import pad

from qerl.kernels.packed_sequences import Packing

#: Queries of a prompt per program of attention.
QUERY_BLOCK = 128


@dataclass(frozen=True)
class PromptRow:
    """`n` tokens of concatenated prompts; padding, if any, is a further prompt at the end."""

    ids: Tensor  # [n] int32
    positions: Tensor  # [n] int32, of each token in its prompt
    places: Tensor  # [n] int32, place in the cache: page * PAGE + offset in the page
    last: Tensor  # [prompts] int32, index of each prompt's last token; 0 for padding prompts of a graph
    blocks: Tensor  # [blocks, 3] int32, for each block of queries: its first query, and its prompt's start and end
    #: The prompts' lengths, for attention prompt by prompt; None in graphs, which must not depend on the host.
    packing: Packing | None
    #: [prompts] int32, the rows of delta nets' states that get those after each prompt; None without delta nets.
    slots: Tensor | None = None

    @classmethod
    def of(
        cls, row: Tensor, tokens: int, prompts: int, packing: Packing | None, slots: Tensor | None = None
    ) -> PromptRow:
        """Views of the fields in a `row` from `pack`; `tokens` and `prompts` include a graph's padding."""
        parts = [tokens, tokens, tokens, prompts]
        ids, positions, places, last, blocks = row.split([*parts, len(row) - sum(parts)])
        return cls(ids, positions, places, last, blocks.view(-1, 3), packing, slots)

    @property
    def starts(self) -> Tensor:
        """[prompts] int32, each prompt's first token. That of padding isn't before its end."""
        return pad(self.ends[:-1], (1, 0))

    @property
    def ends(self) -> Tensor:
        """[prompts] int32, the place after each prompt's last token; 1 for padding prompts of a graph."""
        return self.last + 1


def pack(
    prompts: Sequence[Sequence[int]], pages: Sequence[Sequence[int]], page: int, tokens: int, most: int | None = None
) -> np.ndarray:
    """The concatenated fields of a `PromptRow` of `tokens`, int32.

    `page` is the number of tokens per page. Padding has position 0 and goes to page 0, which no sequence owns. With
    `most`, prompts and blocks are padded with empty ones, so that their numbers don't depend on the prompts.
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
    """Blocks of queries of the prompts between `ends`; blocks with the most keys come first."""
    blocks = [(start, first, end) for first, end in pairwise(ends) for start in range(first, end, QUERY_BLOCK)]
    return sorted(blocks, key=lambda block: block[1] - block[0])
