"""What the kernels of a decode step's attention share: their arguments, sizes, and a page's part of the sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Cache(NamedTuple):
    """The tensors of a `KVCache`; `scales` aren't read without FP8."""

    data: Tensor
    scales: Tensor


class Sequences(NamedTuple):
    """The slot of each row, and the position of the last token and the pages of each slot."""

    rows: Tensor
    position: Tensor
    pages: Tensor
    pages_stride: int


class Rope(NamedTuple):
    """Cosines and sines [positions, R / 2] of the R elements of a head that rotate."""

    cos: Tensor
    sin: Tensor


class HeadNorms(NamedTuple):
    """Weights [D] of the norms of queries and keys; not read if the model has none."""

    query: Tensor
    key: Tensor
    eps: float


class SplitSums(NamedTuple):
    """The results of splits, which are then combined: unnormalised output, largest score and sum of weights."""

    summed: Tensor
    highest: Tensor
    total: Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes known at compilation. Each must be a field, because Triton's cache compares only fields."""

    query: int  # heads
    kv: int  # heads
    group: int  # query heads of a KV head
    rows: int  # rows to which one program attends
    members: int  # query heads of a KV head in all these rows, padded to the least size of a matrix product
    dim: int
    pitch: int  # features of qkv from one query head to the next; behind each its gate, if it is more than `dim`
    keys: int  # features of qkv before the keys
    width: int  # of qkv
    dim_block: int  # padded
    half_block: int  # half of the dimension, padded
    page: int
    table: int  # pages of a slot, padded; 0 for one row, since each number is another kernel
    splits: int
    stages: int
    normed: bool
    norm_offset: float
    sinks: bool
    rotary: int  # elements of a head that rotate
    window: int  # tokens that a token sees, or 0 for all so far
    rounded: bool  # keys and values are in FP8
    appends: bool  # each program its own new tokens, while others attend
    early: bool  # a split loads its first page while qkv is computed


@triton.jit
def first_seen(position, shape: tl.constexpr):
    """The first token that a token at `position` sees."""
    if shape.window:
        return tl.maximum(position - (shape.window - 1), 0)
    return 0


@triton.jit
def seen(token, end, low, shape: tl.constexpr):
    """Which tokens are before `end`, and in the window that begins at `low`."""
    if shape.window:
        return (token < end) & (token >= low)
    return token < end


@triton.jit
def attend_to_page(
    q1, q2, k1, k2, v, k_scale, v_scale, exists, highest, total, summed, scale, shape: tl.constexpr
):  # fmt: skip
    """Continue softmax(q k) v over the tokens of a page that exist for each query; scores are in units of log2."""
    if shape.rounded:
        k1, k2, v = k1.to(q1.dtype), k2.to(q1.dtype), v.to(q1.dtype)
    scores = tl.dot(q1, k1, input_precision="ieee") + tl.dot(q2, k2, input_precision="ieee")
    if shape.rounded:
        scores *= k_scale[None, :]
    scores = tl.where(exists, scores * scale, float("-inf"))
    rising = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - rising[:, None])
    fade = tl.exp2(highest - rising)
    total = total * fade + tl.sum(weights, axis=1)
    if shape.rounded:
        weights *= v_scale[None, :]
    summed = summed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return rising, total, summed


@triton.jit
def gate_of(query, inside, shape: tl.constexpr):
    """The factors of a head's results, of the places of its query: the sigmoid of the gate behind it."""
    return tl.sigmoid(tl.load(query + shape.dim, inside, other=0.0).to(tl.float32))
