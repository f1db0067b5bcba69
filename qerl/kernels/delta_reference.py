"""Gated delta nets of decode steps and prompts in plain PyTorch, token by token (Yang et al. 2025, Eq. 10).

CPUs use them, and the kernels of `qerl.kernels.delta` are tested against them. In the shapes n is the number of
tokens, C channels, H value heads, K and V the features of a key and of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from qerl.kernels.decode_state import IDLE, DecodeState
from qerl.kernels.delta_state import DeltaHeads, DeltaState
from qerl.kernels.prompts import PromptRow

#: What is added to the squares of a query's or key's length before it is divided by the length.
LENGTH_EPS = 1e-6


def delta_step(
    mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, heads: DeltaHeads, net: DeltaState, state: DecodeState, rows: Tensor
) -> Tensor:
    """A delta net's normalised, gated outputs [B, H * V] for one token of each slot in `rows` [B], 0 for idle rows.

    It advances the slots' states in `net`. Inputs of the convolution are `mixed` [B, C], gates of the outputs `z`
    [B, H * V], and gates of the recurrence `b` and `a` [B, H]. All may be columns of one tensor.
    """
    live = state.position[rows] != IDLE
    out = mixed.new_zeros(len(rows), heads.parts[2])
    slots = rows[live].long()
    window = torch.cat([net.recent[slots], mixed[live, None]], 1)
    net.recent[slots] = window[:, 1:]
    query, key, value = _heads(_convolved(window, heads)[:, 0], heads)
    gates = _gates(b[live], a[live], heads)
    result, net.recurrent[slots] = _rule(query, key, value, *gates, net.recurrent[slots])
    out[live] = _gated_norm(result, z[live], heads)
    return out


def delta_prompts(
    mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, heads: DeltaHeads, net: DeltaState, row: PromptRow
) -> Tensor:
    """The outputs [n, H * V] of a `row` of prompts, 0 for padding; `net` then has each prompt's state in its slot.

    Shapes are those of `delta_step`.
    """
    assert row.slots is not None
    out = mixed.new_zeros(len(mixed), heads.parts[2])
    for start, end, slot in zip(row.starts.tolist(), row.ends.tolist(), row.slots.tolist(), strict=True):
        if start >= end:
            continue
        window = pad(mixed[start:end], (0, 0, heads.taps - 1, 0))
        query, key, value = _heads(_convolved(window[None], heads)[0], heads)
        decay, beta = _gates(b[start:end], a[start:end], heads)
        now, results = torch.zeros_like(net.recurrent[slot]), []
        for one in zip(query, key, value, decay, beta, strict=True):
            result, now = _rule(*one, now)
            results.append(result)
        net.recurrent[slot] = now
        out[start:end] = _gated_norm(torch.stack(results), z[start:end], heads)
    remember(mixed, net, row)
    return out


def remember(mixed: Tensor, net: DeltaState, row: PromptRow) -> None:
    """Write each prompt's last inputs of the convolution to its slot, after zeros where the prompt is short."""
    assert row.slots is not None
    taps = torch.arange(-net.recent.shape[1], 0, device=mixed.device)
    place = row.ends[:, None] + taps
    known = (place >= row.starts[:, None])[..., None]
    net.recent[row.slots.long()] = torch.where(known, mixed[place.clamp(min=0)], 0)


def _convolved(window: Tensor, heads: DeltaHeads) -> Tensor:
    """The activated convolution [P, T, C] of P windows [P, taps - 1 + T, C], in float32 at least."""
    wide = window.to(torch.promote_types(window.dtype, torch.float32))
    products = wide.unfold(1, heads.taps, 1) * heads.convolution.to(wide.dtype)
    return silu(products.sum(-1))


def _heads(convolved: Tensor, heads: DeltaHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of length 1 [n, H, K], queries divided by the root of K, and values [n, H, V]."""
    query, key, value = convolved.split(heads.parts, -1)
    query, key = (_unit(part.unflatten(-1, (heads.key, -1)), heads) for part in (query, key))
    return query * heads.key_dim**-0.5, key, value.unflatten(-1, (heads.value, -1))


def _unit(x: Tensor, heads: DeltaHeads) -> Tensor:
    unit = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS)
    return unit.repeat_interleave(heads.value // heads.key, 1)


def _gates(b: Tensor, a: Tensor, heads: DeltaHeads) -> tuple[Tensor, Tensor]:
    """The factors [n, H] by which a state decays, and those of what is written to it."""
    wide = torch.promote_types(b.dtype, torch.float32)
    rate = heads.log_rate.to(wide).exp() * softplus(a.to(wide) + heads.rate_bias.to(wide))
    return torch.exp(-rate), b.to(wide).sigmoid()


def _rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs [..., H, V] of one token, and the next state of `now` [..., H, K, V]."""
    now = now * decay[..., None, None]
    change = beta[..., None] * (value - (now * key[..., None]).sum(-2))
    now = now + key[..., None] * change[..., None, :]
    return (now * query[..., None]).sum(-2), now


def _gated_norm(x: Tensor, z: Tensor, heads: DeltaHeads) -> Tensor:
    """norm(x) * silu(z) [n, H * V] of x [n, H, V] and z [n, H * V], in the dtype of z."""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + heads.eps)
    return ((heads.norm.to(x.dtype) * normed).flatten(1) * silu(z.to(x.dtype))).to(z.dtype)
