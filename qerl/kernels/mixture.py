"""Operations of a mixture of experts in Triton; `qerl.kernels.mixture_reference` has the PyTorch versions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels import mixture_reference
from qerl.kernels.group_many import close_blocks, group_many
from qerl.kernels.groups import Groups
from qerl.kernels.launch import begin, dependent

#: Pairs up to which one launch groups them: each of its programs holds all. `qerl.kernels.group_many` has the rest.
MOST_PAIRS = 2048
#: The fewest places for pairs in that launch: one for each of its threads, so that none counts a pair twice.
_LEAST_PAIRS = 128
#: Below any score as an integer.
_LOWEST = tl.constexpr(-(2**31))
_BLOCK = 1024
#: Tokens up to which one launch computes a router's scores, and the numbers of them that a program has in registers.
MOST_SCORED = 128
_SCORED_NUMBERS = 8 * 2048


@triton.jit(do_not_specialize=["tokens"])
def _scores(
    x, weight, bias, out, tokens, experts, width,
    BIASED: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores of one expert for some tokens."""
    expert = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + expert * width + column, column < width, other=0.0)
    begin(PDL)
    inside = (token < tokens)[:, None] & (column < width)[None, :]
    read = tl.load(x + token[:, None] * width + column[None, :], inside, other=0.0)
    total = tl.sum(read.to(tl.float32) * w[None, :], 1)
    if BIASED:
        total += tl.load(bias + expert)
    tl.store(out + token * experts + expert, total, token < tokens)


def scores(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `mixture_reference.scores`. Products of more tokens than `MOST_SCORED` are cuBLAS's."""
    (tokens, width), experts = x.shape, len(weight)
    if tokens > MOST_SCORED:
        return mixture_reference.scores(x, weight, bias)
    out = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    size = min(triton.next_power_of_2(tokens), max(_SCORED_NUMBERS // block, 1))
    _scores[(experts, triton.cdiv(tokens, size))](
        x, weight, weight if bias is None else bias, out, tokens, experts, width,
        BIASED=bias is not None, TOKENS=size, BLOCK=block, num_warps=4, **dependent(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _places(scores, e, CHOSEN: tl.constexpr):
    """The place [T, E] of each expert e [1, E] in the order of a token's CHOSEN highest scores; CHOSEN of the others.

    Scores are compared as integers of the same order: GPUs have an instruction for the largest integer of a warp.
    A chosen expert's integer becomes its place above the lowest one, which is below that of any score.
    """
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # -0 equals 0
    left = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    for place in tl.static_range(CHOSEN):
        best = tl.max(left, 1)[:, None]
        best_expert = tl.min(tl.where(left == best, e, scores.shape[1]), 1)[:, None]
        left = tl.where(e == best_expert, _LOWEST + place, left)
    return tl.where(left < _LOWEST + CHOSEN, left ^ _LOWEST, CHOSEN)


@triton.jit
def _probabilities(scores, place, CHOSEN: tl.constexpr, NORMALISED: tl.constexpr):
    """Those [T, E] of a softmax over all experts, or over the chosen ones."""
    power = tl.exp(scores - tl.max(scores, 1)[:, None])
    total = tl.sum(tl.where(place < CHOSEN, power, 0.0) if NORMALISED else power, 1)
    return power / total[:, None]


@triton.jit
def _route(
    scores, numbers, weights, experts,
    CHOSEN: tl.constexpr, NORMALISED: tl.constexpr, EXPERTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)[None, :]
    begin(PDL)
    read = tl.load(scores + row * experts + e, e < experts, other=-float("inf"))
    place = _places(read, e, CHOSEN)
    tl.store(numbers + row * CHOSEN + place, e, place < CHOSEN)
    tl.store(weights + row * CHOSEN + place, _probabilities(read, place, CHOSEN, NORMALISED), place < CHOSEN)


# Routes and groups stay two launches: one launch was slower for 128 experts, and saved 0.02 ms of a step for 32
# (docs/lab/mixtures.md).
def route(scores: Tensor, chosen: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """See `mixture_reference.route`. Of equal scores the first wins."""
    (rows, experts), device = scores.shape, scores.device
    numbers = torch.empty(rows, chosen, dtype=torch.int32, device=device)
    weights = torch.empty(rows, chosen, dtype=torch.float32, device=device)
    _route[(rows,)](
        scores, numbers, weights, experts,
        CHOSEN=chosen, NORMALISED=normalised, EXPERTS=triton.next_power_of_2(experts), num_warps=1,
        **dependent(device),
    )  # fmt: skip
    return numbers, weights


@triton.jit(do_not_specialize=["count", "blocks"])
def _group(
    numbers, pairs, owners, count, experts, blocks,
    PAIRS: tl.constexpr, EXPERTS: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program writes the blocks of its expert; the one after the last expert's writes blocks without pairs."""
    expert, e = tl.program_id(0), tl.arange(0, EXPERTS)
    pair, block = tl.arange(0, PAIRS), tl.arange(0, BLOCKS)
    begin(PDL)
    # Pairs that don't exist count for an expert that doesn't exist.
    number = tl.load(numbers + pair, pair < count, other=experts)
    filled = (tl.histogram(number, EXPERTS) + SIZE - 1) // SIZE
    mine = (number == expert) & (pair < count)
    first, have = tl.sum(tl.where(e < expert, filled, 0), 0), tl.sum(mine.to(tl.int32), 0)
    end = first + (have + SIZE - 1) // SIZE
    place = tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(pairs + first * SIZE + place, pair, mine)
    end, owner = close_blocks(pairs, first, have, end, count, expert, experts, blocks, SIZE)
    tl.store(owners + block, block * 0 + owner, (block >= first) & (block < end))


def group(numbers: Tensor, experts: int) -> Groups:
    """See `mixture_reference.group`."""
    (tokens, chosen), device = numbers.shape, numbers.device
    if tokens * chosen > MOST_PAIRS:
        return group_many(numbers, experts)
    groups = Groups.empty(tokens, chosen, experts, device)
    blocks, size = groups.pairs.shape
    _group[(experts + 1,)](
        numbers, groups.pairs, groups.experts, groups.count, experts, blocks,
        PAIRS=max(triton.next_power_of_2(groups.count), _LEAST_PAIRS), EXPERTS=triton.next_power_of_2(experts + 1),
        BLOCKS=triton.next_power_of_2(blocks), SIZE=size, num_warps=4, **dependent(device),
    )  # fmt: skip
    return groups


@triton.jit
def _combine(
    y, weights, out, width, CHOSEN: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    begin(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(CHOSEN):
        pair = row * CHOSEN + place
        part = tl.load(y + pair * width + column, inside, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * part
    place_out = out + row * width + column
    if RESIDUAL:
        total += tl.load(place_out, inside, other=0.0).to(tl.float32)
    tl.store(place_out, total.to(out.dtype.element_ty), inside)


def combine(y: Tensor, weights: Tensor, out: Tensor, residual: bool) -> None:
    """See `mixture_reference.combine`."""
    rows, width = out.shape
    _combine[(rows, triton.cdiv(width, _BLOCK))](
        y, weights, out, width,
        CHOSEN=weights.shape[1], RESIDUAL=residual, BLOCK=_BLOCK, num_warps=4, **dependent(out.device),
    )  # fmt: skip


@triton.jit
def _combine_gradients(grad, y, weights, of_y, of_weights, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """Gradients of a token's outputs of experts and of their weights."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    above = tl.load(grad + row * width + column, inside, other=0.0).to(tl.float32)
    for place in tl.static_range(CHOSEN):
        pair = row * CHOSEN + place
        part = tl.load(y + pair * width + column, inside, other=0.0).to(tl.float32)
        tl.store(of_weights + pair, tl.sum(part * above, 0))
        tl.store(of_y + pair * width + column, (above * tl.load(weights + pair)).to(of_y.dtype.element_ty), inside)


def combine_gradients(grad: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """See `mixture_reference.combine_gradients`; y and weights are read once."""
    if y.dtype == torch.float64:
        return mixture_reference.combine_gradients(grad, y, weights)
    (rows, width), of_y, of_weights = grad.shape, torch.empty_like(y), torch.empty_like(weights)
    block = triton.next_power_of_2(width)
    _combine_gradients[(rows,)](
        grad, y, weights, of_y, of_weights, width,
        CHOSEN=weights.shape[1], BLOCK=block, num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return of_y, of_weights
