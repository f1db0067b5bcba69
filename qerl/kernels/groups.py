"""Groups of a mixture's pairs, a token and one of its experts: blocks that each have pairs of one expert.

A grouped product multiplies each block by its expert's weights. The number of blocks depends on nothing but the numbers
of tokens and experts, so that no host waits for the choice of experts and CUDA graphs can have it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

#: By the most tokens, the pairs of a block. A token chooses an expert once, so up to 32 tokens one block has all of an
#: expert's pairs, and its weights are read once. Not measured on a GPU yet.
_PAIRS = {8: 8, 16: 16, 128: 32, 1024: 64}
_MOST_PAIRS = 128
#: The sizes of all blocks.
BLOCK_SIZES = (*dict.fromkeys(_PAIRS.values()), _MOST_PAIRS)


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


def block_size(tokens: int) -> int:
    """Pairs of a block, for this number of tokens."""
    return next((size for most, size in _PAIRS.items() if tokens <= most), _MOST_PAIRS)


def most_blocks(tokens: int, chosen: int, experts: int, size: int) -> int:
    """The most blocks that pairs of `tokens` with `chosen` of `experts` can fill, however they are chosen."""
    pairs = tokens * chosen
    used = min(pairs, experts)
    full = (pairs - used) // size
    return used if tokens <= size else used + full
