"""Gated delta nets of decode steps and prompts in Triton; `qerl.kernels.reference` has the PyTorch version.

Three launches: the convolution with the lengths of queries and keys, the recurrence, and the norm with its gate. A
program of the recurrence has some columns of one head's state in registers. It takes the tokens of a sequence one by
one, which are one in a decode step and all of a prompt.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.reference import LENGTH_EPS, remember
from qerl.kernels.state import IDLE, DecodeState, DeltaHeads, DeltaState, PromptRow
from qerl.kernels.triton.launch import begin, dependent, kernel

#: Columns of a head's state that a program has in registers, and its warps. A step reads and writes whole states once,
#: so that memory bounds it. A prompt's tokens follow each other, and a program of one warp waits for no other.
_STEP, _PROMPT = (64, 4), (16, 1)
_IDLE = tl.constexpr(IDLE)
_EPS = tl.constexpr(LENGTH_EPS)


@kernel
def _convolve(
    mixed, stride, weight, recent, positions, slots, out,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
    TAPS: tl.constexpr, PROMPTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of queries, keys or values of one token, convolved; queries and keys get the length 1.

    `positions` are those of the tokens of prompts, else those of the slots, of which idle ones don't change.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY * KEY_DIM + VALUE * VALUE_DIM
    column = tl.arange(0, BLOCK)
    is_value = head >= 2 * KEY
    channel = column + tl.where(is_value, 2 * KEY * KEY_DIM + (head - 2 * KEY) * VALUE_DIM, head * KEY_DIM)
    mask = column < tl.where(is_value, VALUE_DIM, KEY_DIM)
    begin(PDL)
    if PROMPTS:
        position = tl.load(positions + token)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        mask = mask & (tl.load(positions + slot) != _IDLE)
        recent += slot * (TAPS - 1) * CHANNELS
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        # In prompts the tap reads the row, unless its token belongs to the prompt before.
        if PROMPTS:
            seen = mask & (position >= TAPS - 1 - tap)
            x = tl.load(mixed + (token - (TAPS - 1 - tap)) * stride + channel, seen, other=0.0)
        elif tap == TAPS - 1:
            x = tl.load(mixed + token * stride + channel, mask, other=0.0)
        else:
            x = tl.load(recent + tap * CHANNELS + channel, mask, other=0.0)
        if not PROMPTS and tap > 0:
            tl.store(recent + (tap - 1) * CHANNELS + channel, x, mask)
        total += x.to(tl.float32) * tl.load(weight + channel * TAPS + tap, mask, other=0.0).to(tl.float32)
    total = total * tl.sigmoid(total)
    length = tl.rsqrt(tl.sum(total * total) + _EPS)
    total = total * tl.where(is_value, 1.0, length) * tl.where(head < KEY, 1 / KEY_DIM**0.5, 1.0)
    tl.store(out + token * CHANNELS + channel, total, mask)


@triton.jit
def _token(
    heads, b, a, token, stride, head, row, column, rate, bias,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Query, key, value, decay and beta of one token's head."""
    base = heads + token * (2 * KEY * KEY_DIM + VALUE * VALUE_DIM)
    keys = base + head // (VALUE // KEY) * KEY_DIM + row
    query = tl.load(keys, row < KEY_DIM, other=0.0)
    key = tl.load(keys + KEY * KEY_DIM, row < KEY_DIM, other=0.0)
    value = tl.load(base + 2 * KEY * KEY_DIM + head * VALUE_DIM + column, column < VALUE_DIM, other=0.0)
    step = tl.load(a + token * stride + head).to(tl.float32) + bias
    # log(1 + exp(step)) without overflow
    soft = tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))
    beta = tl.sigmoid(tl.load(b + token * stride + head).to(tl.float32))
    return query, key, value, tl.exp(-rate * soft), beta


@kernel
def _recur(
    heads, b, a, stride, log_rate, rate_bias, recurrent, positions, slots, last, out,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PROMPTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The recurrence of one head's columns over the tokens of a sequence."""
    # Programs of neighbouring columns, which share lines of memory, follow each other.
    piece = tl.program_id(2)
    head = tl.program_id(1)
    row = tl.arange(0, KEY_BLOCK)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rate = tl.exp(tl.load(log_rate + head).to(tl.float32))
    bias = tl.load(rate_bias + head).to(tl.float32)
    begin(PDL)
    slot = tl.load(slots + piece).to(tl.int64)
    recurrent += (slot * VALUE + head) * (KEY_DIM * VALUE_DIM)
    place = recurrent + row[:, None] * VALUE_DIM + column[None, :]
    mask = (row < KEY_DIM)[:, None] & (column < VALUE_DIM)[None, :]
    out += head * VALUE_DIM + column
    if PROMPTS:
        start = tl.where(piece == 0, 0, tl.load(last + tl.maximum(piece - 1, 0)) + 1).to(tl.int64)
        end = tl.load(last + piece).to(tl.int64) + 1
        if start >= end:  # padding of a graph
            return
        now = tl.zeros([KEY_BLOCK, COLUMNS], tl.float32)
    else:
        start = piece.to(tl.int64)
        end = start + 1
        if tl.load(positions + slot) == _IDLE:
            tl.store(out + start * (VALUE * VALUE_DIM), tl.zeros([COLUMNS], tl.float32), column < VALUE_DIM)
            return
        now = tl.load(place, mask, other=0.0)
    query, key, value, decay, beta = _token(
        heads, b, a, start, stride, head, row, column, rate, bias, KEY, VALUE, KEY_DIM, VALUE_DIM
    )
    for token in range(start, end):
        q, k, v, fade, gain = query, key, value, decay, beta
        if PROMPTS:  # the next token's loads, under this one's arithmetic
            query, key, value, decay, beta = _token(
                heads, b, a, tl.minimum(token + 1, end - 1), stride, head, row, column, rate, bias,
                KEY, VALUE, KEY_DIM, VALUE_DIM,
            )  # fmt: skip
        now = now * fade
        change = gain * (v - tl.sum(now * k[:, None], axis=0))
        now += k[:, None] * change[None, :]
        result = tl.sum(now * q[:, None], axis=0)
        tl.store(out + token * (VALUE * VALUE_DIM), result, column < VALUE_DIM)
    tl.store(place, now, mask)


@kernel
def _gated_norm(
    x, z, stride, weight, out, eps,
    VALUE: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    mask = column < VALUE_DIM
    scale = tl.load(weight + column, mask, other=0.0).to(tl.float32)
    begin(PDL)
    place = (token * VALUE + head) * VALUE_DIM + column
    wide = tl.load(x + place, mask, other=0.0)
    gate = tl.load(z + token * stride + head * VALUE_DIM + column, mask, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide) / VALUE_DIM + eps)
    tl.store(out + place, (scale * normed * gate * tl.sigmoid(gate)).to(out.dtype.element_ty), mask)


def delta_step(
    mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, heads: DeltaHeads, net: DeltaState, state: DecodeState, rows: Tensor
) -> Tensor:
    """See `reference.delta_step`."""
    convolved = _convolved(mixed, heads, net.recent, state.position, rows, prompts=False)
    out = torch.empty(len(rows), heads.parts[2], dtype=torch.float32, device=mixed.device)
    _run(convolved, b, a, heads, net, state.position, rows, rows, out, prompts=False)
    return _normed(out, z, heads)


def delta_prompts(
    mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, heads: DeltaHeads, net: DeltaState, row: PromptRow
) -> Tensor:
    """See `reference.delta_prompts`."""
    assert row.slots is not None
    convolved = _convolved(mixed, heads, net.recent, row.positions, row.slots, prompts=True)
    out = torch.zeros(len(mixed), heads.parts[2], dtype=torch.float32, device=mixed.device)
    _run(convolved, b, a, heads, net, row.positions, row.slots, row.last, out, prompts=True)
    remember(mixed, net, row)
    return _normed(out, z, heads)


def _convolved(
    mixed: Tensor, heads: DeltaHeads, recent: Tensor, positions: Tensor, slots: Tensor, prompts: bool
) -> Tensor:
    """Queries and keys of length 1, and values, [n, C] float32."""
    out = torch.empty(mixed.shape, dtype=torch.float32, device=mixed.device)
    _convolve[(len(mixed), 2 * heads.key + heads.value)](
        mixed, mixed.stride(0), heads.convolution, recent, positions, slots, out,
        **_sizes(heads), BLOCK=triton.next_power_of_2(max(heads.key_dim, heads.value_dim)), TAPS=heads.taps,
        PROMPTS=prompts, num_warps=1, **dependent(mixed.device),
    )  # fmt: skip
    return out


def _run(
    convolved: Tensor, b: Tensor, a: Tensor, heads: DeltaHeads, net: DeltaState, positions: Tensor, slots: Tensor,
    last: Tensor, out: Tensor, prompts: bool,
) -> None:  # fmt: skip
    """Write the recurrence's outputs [n, H * V] float32 to `out`, and the states after it to `net`."""
    most, warps = _PROMPT if prompts else _STEP
    columns = min(most, triton.next_power_of_2(heads.value_dim))
    assert b.stride(0) == a.stride(0)
    _recur[(triton.cdiv(heads.value_dim, columns), heads.value, len(slots))](
        convolved, b, a, b.stride(0), heads.log_rate, heads.rate_bias, net.recurrent, positions, slots, last, out,
        **_sizes(heads), KEY_BLOCK=triton.next_power_of_2(heads.key_dim), COLUMNS=columns, PROMPTS=prompts,
        num_warps=warps, **dependent(convolved.device),
    )  # fmt: skip


def _normed(x: Tensor, z: Tensor, heads: DeltaHeads) -> Tensor:
    out = torch.empty(x.shape, dtype=z.dtype, device=z.device)
    _gated_norm[(len(x), heads.value)](
        x, z, z.stride(0), heads.norm, out, heads.eps, VALUE=heads.value, VALUE_DIM=heads.value_dim,
        BLOCK=triton.next_power_of_2(heads.value_dim), num_warps=1, **dependent(x.device),
    )  # fmt: skip
    return out


def _sizes(heads: DeltaHeads) -> dict[str, int]:
    return {"KEY": heads.key, "VALUE": heads.value, "KEY_DIM": heads.key_dim, "VALUE_DIM": heads.value_dim}
