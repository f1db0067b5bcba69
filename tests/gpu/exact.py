"""Norms and attention over a paged cache in float64, and log-probabilities by a forward pass, for tests on a GPU."""

import numpy as np
import torch

from qerl.kernels.state import PAGE, DecodeState, Heads

CUDA = torch.device("cuda")


def normed(x, norm):
    scale = norm.weight.double() + norm.offset + (0 if norm.noise is None else norm.noise.double())
    return scale * x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()


#: Half the distance of neighbours near 1.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def draw(*shape, dtype=torch.float32, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(CUDA, dtype)


def assert_rounded_once(found, exact, roundings=32):
    """Errors are those of the dtype's rounding and of a few in float32: of sums, fast roots and exponentials."""
    exact = exact.detach()
    few = roundings * ROUNDING[torch.float32]
    bound = (ROUNDING[found.dtype] + few) * exact.abs() + few * exact.square().mean().sqrt()
    errors = (found.detach().double() - exact).abs() / bound
    assert errors.max() <= 1, f"{errors.max():.3g} of the bound"


def forced(lm, prompt, completions, temperature=1.0):
    """Log-probabilities float32 [completions, tokens] of completions of one length, by one forward pass."""
    ids = torch.tensor([prompt + completion for completion in completions], device=CUDA)
    with torch.no_grad():
        logits = lm(ids).logits[:, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[:, len(prompt) :, None])[..., 0]


def differences(policy, prompts, groups, temperature=1.0):
    """The log-probabilities of Hugging Face's forward pass minus those of the sampler, of all tokens."""
    found = []
    for prompt, group in zip(prompts, groups, strict=True):
        for length in {len(completion.token_ids) for completion in group}:
            alike = [completion for completion in group if len(completion.token_ids) == length]
            with policy.autocast():
                exact = forced(policy.lm, prompt, [completion.token_ids for completion in alike], temperature)
            found.append((exact.cpu().numpy() - np.array([completion.logprobs for completion in alike])).flatten())
    return np.concatenate(found)


def k3(difference):
    """The mean over tokens of the k3 estimate of the divergence between sampler and policy."""
    return np.mean(np.exp(difference) - 1 - difference)


def heads_of(dtype, query, kv, dim, normed, rotary, window, has_sinks):
    """Heads with random norms and sinks, and cosines and sines of 2,200 positions.

    `normed` is False, True for norms as in Qwen3, or "1 + w" for those with an offset.
    """
    offset = float(normed == "1 + w")
    norms = [(1 - offset + 0.3 * torch.randn(dim, device=CUDA)).to(dtype) if normed else None for _ in range(2)]
    sinks = torch.randn(query, device=CUDA).to(dtype) if has_sinks else None
    heads = Heads(query, kv, dim, dim**-0.5, *norms, eps=1e-6, norm_offset=offset, window=window, sinks=sinks)
    angle = torch.rand(2200, rotary // 2, device=CUDA) * 6
    return heads, (angle.cos().to(dtype), angle.sin().to(dtype))


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
