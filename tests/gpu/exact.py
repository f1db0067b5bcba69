"""Norms and attention over a paged cache in float64, for the tests of kernels on a GPU."""

import torch

from qerl.kernels.state import PAGE, DecodeState

CUDA = torch.device("cuda")


def normed(x, norm):
    scale = norm.weight.double() + norm.offset + (0 if norm.noise is None else norm.noise.double())
    return scale * x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()


def paged(lengths, heads, dtype):
    """Slots whose last token is at `lengths` - 1, and a cache that is NaN where it holds none of their tokens."""
    each = max(-(-length // PAGE) for length in lengths)
    state = DecodeState.empty(len(lengths), 1, each, CUDA)
    order = torch.randperm(len(lengths) * each, device=CUDA).view(len(lengths), each) + 1
    state.pages[:-1] = order.int()
    state.position[:-1] = torch.tensor(lengths, device=CUDA).int() - 1
    cache = torch.full((1 + order.numel(), 2, heads.kv, PAGE, heads.dim), torch.nan, dtype=dtype, device=CUDA)
    for slot, length in enumerate(lengths):
        for token in range(length - 1):
            cache[order[slot, token // PAGE], :, :, token % PAGE] = torch.randn(2, heads.kv, heads.dim, device=CUDA)
    return state, cache


def rotated(x, norm, heads, cos, sin):
    """x [heads, D], rotated in float64. The norm rounds where that of transformers does, for Qwen3 or with an offset.

    Without this rounding, one row of two tokens in some 4,000 is beyond the tolerance of bfloat16.
    """
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + heads.eps).sqrt()
        if not heads.norm_offset:
            x = x.to(norm.dtype).double()
        x = ((heads.norm_offset + norm.double()) * x).to(norm.dtype).double()
    rotary = 2 * cos.shape[-1]
    first, second = x[..., :rotary].chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., rotary:]], -1)


def kernels_order(heads, rope):
    """The order of a key's elements in the kernels' cache: pairs that rotate together are half a head apart."""
    pairs = rope[0].shape[1]
    rest = heads.dim // 2 - pairs
    places = torch.arange(heads.dim, device=CUDA).split([pairs, pairs, rest, rest])
    return torch.cat([places[0], places[2], places[1], places[3]])


def with_sinks(scores, heads):
    """Scores [H, ..., T] with those of a further key, if heads have sinks."""
    if heads.sinks is None:
        return scores
    sinks = heads.sinks.double().view(-1, *[1] * (scores.ndim - 1))
    return torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)


def expected_attention(qkv, cache, state, slot, rope, heads):
    """The attention of one row in float64, [Hq * D], with its rotated key [Hkv, D]."""
    position = int(state.position[slot])
    parts = qkv.double().view(-1, heads.dim).split([heads.query, heads.kv, heads.kv])
    angles = rope[0][position].double(), rope[1][position].double()
    query = rotated(parts[0], heads.q_norm, heads, *angles)
    key = rotated(parts[1], heads.k_norm, heads, *angles)
    pages = state.pages[slot].long()
    token = torch.arange(0 if heads.window is None else max(position + 1 - heads.window, 0), position, device=CUDA)
    held = cache[pages[token // PAGE], :, :, token % PAGE].double()  # [tokens, 2, Hkv, D]
    held[:, 0] = held[:, 0][..., kernels_order(heads, rope).argsort()]
    keys = torch.cat([held[:, 0], key[None]]).repeat_interleave(heads.query // heads.kv, 1)
    values = torch.cat([held[:, 1], parts[2][None]]).repeat_interleave(heads.query // heads.kv, 1)
    scores = torch.einsum("hd,thd->ht", query, keys) * heads.scale
    weights = with_sinks(scores, heads).softmax(-1)[..., : len(keys)]
    return torch.einsum("ht,thd->hd", weights, values).flatten(), key, parts[2]
