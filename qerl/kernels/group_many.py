"""Groups of more pairs than one launch can hold, in Triton: their number for each expert, then their places.

A sort takes some thirty launches of PyTorch, whose overhead is longer than a block's attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.groups import Groups

#: Pairs that a program reads at a time.
_PAIRS = 2048
#: Numbers of blocks that a program writes at a time.
_OWNERS = 128


@triton.jit(do_not_specialize=["count"])
def _count(numbers, counts, count, experts, PAIRS: tl.constexpr, EXPERTS: tl.constexpr):
    """Add the pairs of each expert among some pairs to counts [experts]."""
    pair, e = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS), tl.arange(0, EXPERTS)
    # Pairs that don't exist count for an expert that doesn't exist.
    number = tl.load(numbers + pair, pair < count, other=experts)
    tl.atomic_add(counts + e, tl.histogram(number, EXPERTS), e < experts)


@triton.jit
def close_blocks(pairs, first, filled, end, count, expert, experts, blocks, SIZE: tl.constexpr):
    """Fill the places left in an expert's last block; return the end of its blocks and the owner that they get.

    The expert has `filled` pairs in the blocks from `first` to `end`. After the last expert come blocks without pairs,
    up to `blocks`, whose owner is -1.
    """
    place = filled + tl.arange(0, SIZE)  # none after whole blocks
    tl.store(pairs + first * SIZE + place, place * 0 + count, place < (end - first) * SIZE)
    return tl.where(expert < experts, end, blocks), tl.where(expert < experts, expert, -1)


@triton.jit(do_not_specialize=["count", "blocks"])
def _place(
    numbers, counts, pairs, owners, count, experts, blocks,
    PAIRS: tl.constexpr, EXPERTS: tl.constexpr, SIZE: tl.constexpr, OWNERS: tl.constexpr,
):  # fmt: skip
    """A program writes the blocks of its expert; the one after the last expert's writes blocks without pairs."""
    expert = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    have = tl.load(counts + e, e < experts, other=0)
    filled = (have + SIZE - 1) // SIZE
    first = tl.sum(tl.where(e < expert, filled, 0), 0)
    end = tl.sum(tl.where(e <= expert, filled, 0), 0)
    done = 0
    for start in range(0, count, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        number = tl.load(numbers + pair, pair < count, other=experts)
        mine = (number == expert) & (pair < count)
        place = done + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(pairs + first * SIZE + place, pair, mine)
        done += tl.sum(mine.to(tl.int32), 0)
    end, owner = close_blocks(pairs, first, done, end, count, expert, experts, blocks, SIZE)
    for start in range(first, end, OWNERS):
        block = start + tl.arange(0, OWNERS)
        tl.store(owners + block, block * 0 + owner, block < end)


def group_many(numbers: Tensor, experts: int) -> Groups:
    """See `mixture_reference.group`. Doesn't wait for the device, and always gives the same groups."""
    (tokens, chosen), device = numbers.shape, numbers.device
    groups, numbers = Groups.empty(tokens, chosen, experts, device), numbers.contiguous()
    (blocks, size), bins = groups.pairs.shape, triton.next_power_of_2(experts + 1)
    count, counts = groups.count, torch.zeros(experts, dtype=torch.int32, device=device)
    _count[(triton.cdiv(count, _PAIRS),)](numbers, counts, count, experts, PAIRS=_PAIRS, EXPERTS=bins, num_warps=4)
    _place[(experts + 1,)](
        numbers, counts, groups.pairs, groups.experts, count, experts, blocks,
        PAIRS=_PAIRS, EXPERTS=bins, SIZE=size, OWNERS=_OWNERS, num_warps=4,
    )  # fmt: skip
    return groups
