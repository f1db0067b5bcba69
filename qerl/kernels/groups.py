"""Groups of a mixture's pairs, a token and one of its experts: blocks that each have pairs of one expert.

A grouped product multiplies each block by its expert's weights. The number of blocks depends on nothing but the numbers
of tokens and experts, so that no host waits for the choice of experts and CUDA graphs can have it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Pairs of a block, and the most pairs of an expert on average with which blocks have that size. An expert that more
#: tokens choose has several blocks, which decode its weights again; a larger block has more pairs that don't exist.
#: They were chosen by times of 1 to 2,048 tokens of Qwen3-30B-A3B and 1 to 512 of gpt-oss-20b on an H200, of which
#: docs/lab/mixtures.md names those that weren't timed with the present kernel.
_MOST_ON_AVERAGE = {8: 4, 16: 8, 32: 16, 64: 128}
BLOCK_SIZES = (*_MOST_ON_AVERAGE, 128)


@dataclass(frozen=True)
class Groups:
    """The pairs of T tokens with k experts each. Pair p is token p // k with its expert number p % k."""

    pairs: Tensor
    """Pairs of each block, int32 [blocks, size]; `count` where a block has fewer."""
    experts: Tensor
    """Expert of each block, int32 [blocks]; -1 of blocks without pairs, whose `pairs` have no meaning."""
    count: int
    """Number of pairs, T k."""
    chosen: int
    """Experts of a token, k."""

    @classmethod
    def empty(cls, tokens: int, chosen: int, experts: int, device: torch.device) -> Groups:
        """Room for any choice of experts, which a kernel fills."""
        size = block_size(tokens, chosen, experts)
        blocks = most_blocks(tokens, chosen, experts, size)
        pairs = torch.empty(blocks, size, dtype=torch.int32, device=device)
        return cls(pairs, torch.empty(blocks, dtype=torch.int32, device=device), tokens * chosen, chosen)

    @property
    def size(self) -> int:
        """Pairs of a block."""
        return self.pairs.shape[1]


@dataclass(frozen=True)
class GroupedLora:
    """LoRA of every expert on a product's pairs, which adds B [N, R] of a pair's expert times its A x [R]."""

    shrunk: Tensor
    """A x of each pair, [pairs, R]."""
    up: Tensor
    """B of each expert with the adapter's scale, [experts, N, R]."""


def block_size(tokens: int, chosen: int, experts: int) -> int:
    """Pairs of a block. It depends on how many an expert has on average, but not on the choice of experts."""
    sizes = (size for size, most in _MOST_ON_AVERAGE.items() if tokens * chosen <= most * experts)
    return next(sizes, BLOCK_SIZES[-1])


def most_blocks(tokens: int, chosen: int, experts: int, size: int) -> int:
    """The most blocks that pairs of `tokens` with `chosen` of `experts` can fill, however they are chosen."""
    pairs = tokens * chosen
    used = min(pairs, experts)
    full = (pairs - used) // size
    return used if tokens <= size else used + full
