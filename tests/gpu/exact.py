"""Attention with its cache, norms and log-probabilities in float64, for tests on a GPU or in Triton's interpreter."""

import os

import numpy as np
import torch

from qerl.kernels.state import FP8, IDLE, PAGE, DecodeState, Heads, KVCache

#: Whether kernels run in Triton's interpreter. It has no arithmetic of bfloat16.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda:0")
DTYPES = [torch.float32] if INTERPRETED else [torch.bfloat16, torch.float32]
#: Half the distance of neighbours near 1.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def draw(*shape, dtype=torch.float32, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(DEVICE, dtype)


def assert_rounded_once(found, exact, roundings=32):
    """Errors are those of the dtype's rounding and of a few in float32: of sums, fast roots and exponentials."""
    exact = exact.detach()
    few = roundings * ROUNDING[torch.float32]
    bound = (ROUNDING[found.dtype] + few) * exact.abs() + few * exact.square().mean().sqrt()
    errors = (found.detach().double() - exact).abs() / bound
    assert errors.max() <= 1, f"{errors.max():.3g} of the bound"


def assert_near(found, exact, tolerance):
    """The error of a whole tensor, relative to the tensor."""
    error = (found.double() - exact).norm() / exact.norm()
    assert error <= tolerance, f"relative error {error:.3g}"


# --- log-probabilities by a forward pass ---


def forced(lm, prompt, completions, temperature=1.0):
    """Log-probabilities float32 [completions, tokens] of completions of one length, by one forward pass."""
    ids = torch.tensor([prompt + completion for completion in completions], device=DEVICE)
    with torch.no_grad():
        logits = lm(ids).logits[:, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[:, len(prompt) :, None])[..., 0]


def differences(policy, prompts, groups, temperature=1.0):
    """Hugging Face's log-probabilities minus the sampler's, for all drawn tokens."""
    found = []
    for prompt, group in zip(prompts, groups, strict=True):
        for length in {len(completion.token_ids) for completion in group}:
            alike = [completion for completion in group if len(completion.token_ids) == length]
            with policy.autocast():
                exact = forced(policy.lm, prompt, [completion.token_ids for completion in alike], temperature)
            difference = exact.cpu().numpy() - np.array([completion.logprobs for completion in alike])
            found.append(difference[np.array([completion.mask for completion in alike])])
    return np.concatenate(found)


def k3(difference):
    """The mean over tokens of the k3 estimate of the divergence between sampler and policy."""
    return np.mean(np.exp(difference) - 1 - difference)


# --- attention ---


def heads_of(dtype, query, kv, dim, rotary, offset=None, window=None, sinks=False, gated=False):
    """Heads with random norms, unless `offset` is None, and sinks; cosines and sines of 2,200 positions."""
    norms = [None if offset is None else (1 - offset + 0.3 * torch.randn(dim, device=DEVICE)).to(dtype) for _ in "qk"]
    # Some sinks are far below scores, and some above.
    scores = torch.linspace(-200, 20, query, device=DEVICE)[torch.randperm(query)].to(dtype) if sinks else None
    options = {"norm_offset": offset or 0.0, "window": window, "sinks": scores, "gated": gated}
    heads = Heads(query, kv, dim, 0.3 if INTERPRETED else dim**-0.5, *norms, eps=1e-6, **options)
    angle = torch.rand(2200, rotary // 2, device=DEVICE) * 6
    return heads, (angle.cos().to(dtype), angle.sin().to(dtype))


def kernels_order(heads, rope):
    """The order of a key's elements in the kernels' cache: pairs that rotate together are half a head apart."""
    pairs = rope[0].shape[1]
    rest = heads.dim // 2 - pairs
    places = torch.arange(heads.dim, device=DEVICE).split([pairs, pairs, rest, rest])
    return torch.cat([places[0], places[2], places[1], places[3]])


def rotated(x, norm, heads, cos, sin):
    """x [n, heads, D], rotated in float64. The norm rounds where that of transformers does, as Qwen3 or with an offset.

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


def parts(qkv, positions, rope, heads):
    """Rotated queries and keys, values and gates or None, each [n, heads, D] in float64."""
    query, key, value, gates = (part if part is None else part.double() for part in heads.parts(qkv))
    angles = [table[positions.long()].double()[:, None] for table in rope]
    return rotated(query, heads.q_norm, heads, *angles), rotated(key, heads.k_norm, heads, *angles), value, gates


def attended(query, key, value, gates, heads):
    """The attention [Q, Hq * D] of queries [Q, Hq, D] of the last Q of K tokens with keys and values [K, Hkv, D]."""
    key, value = (part.repeat_interleave(heads.query // heads.kv, 1) for part in (key, value))
    token = torch.arange(len(key), device=key.device)
    behind = token[len(key) - len(query) :, None] - token
    hidden = (behind < 0) | (behind >= (heads.window or len(key)))
    scores = (torch.einsum("qhd,khd->hqk", query, key) * heads.scale).masked_fill(hidden, -torch.inf)
    if heads.sinks is not None:
        scores = torch.cat([scores, heads.sinks.double()[:, None, None].expand(-1, len(query), 1)], -1)
    weights = scores.softmax(-1)[..., : len(key)]
    out = torch.einsum("hqk,khd->qhd", weights, value)
    return (out if gates is None else out / (1 + (-gates).exp())).flatten(1)


def paged(lengths, heads, dtype, fp8=False):
    """Slots whose last token is at `lengths` - 1, and a cache that is NaN where it has none of their tokens."""
    each = max(-(-length // PAGE) for length in lengths)
    state = DecodeState.empty(len(lengths), 1, each, DEVICE)
    state.pages[:-1] = (torch.randperm(len(lengths) * each, device=DEVICE).view(-1, each) + 1).int()
    state.position[:-1] = torch.tensor(lengths, device=DEVICE).int() - 1
    return state, cache_of(state, heads, dtype, fp8)


def cache_of(state, heads, dtype, fp8=False):
    """The cache of all earlier tokens of the slots. In FP8 other tokens are zeros."""
    tokens = torch.zeros(1 + int(state.pages.max()), PAGE, dtype=torch.bool, device=DEVICE)
    for slot, position in enumerate(state.position.tolist()):
        place = torch.arange(max(position, 0), device=DEVICE)
        tokens[state.pages[slot, place // PAGE].long(), place % PAGE] = True
    data = torch.randn(len(tokens), 2, heads.kv, PAGE, heads.dim, device=DEVICE).to(dtype)
    cache = KVCache.empty(1, len(tokens), heads, FP8 if fp8 else dtype, DEVICE)
    [block] = cache.blocks()
    if not fp8:
        block.data.fill_(torch.nan)
    page, place = torch.where(tokens)
    block.put(page, place, data[page, 0, :, place], data[page, 1, :, place])
    return block


def copied(cache):
    return KVCache(cache.data.clone(), None if cache.scales is None else cache.scales.clone())


def held(cache, pages, order):
    """Keys and values [P * PAGE, Hkv, D] of pages in float64, with a key's elements as the model has them."""
    both = cache.pages_of(pages.long()[None], torch.float64)[0].double().permute(0, 3, 1, 2, 4).flatten(0, 1)
    return both[:, 0][..., order.argsort()], both[:, 1]


def assert_stored(cache, pages, places, order, key, value, close):
    """A cache has keys and values [n, Hkv, D], as they are, or in FP8 the nearest numbers to them."""
    stored = [part.unflatten(0, (-1, PAGE)) for part in held(cache, torch.arange(cache.pages, device=DEVICE), order)]
    found = [part[pages.long(), places.long()] for part in stored]
    if cache.scales is None:
        torch.testing.assert_close(found[0], key, **close)
        assert torch.equal(found[1], value)
        return
    scales = cache.scales[pages.long(), :, :, places.long()].double()  # [n, 2, Hkv]
    for number, (one, exact) in enumerate(zip(found, (key, value), strict=True)):
        scale = scales[:, number, :, None]
        assert torch.equal(scale.float().frexp().mantissa, torch.full_like(scale.float(), 0.5))
        peak = exact.abs().amax(-1, keepdim=True) / scale
        assert peak.min() >= 127
        assert peak.max() <= 258
        # Half of the last of three bits; in bfloat16 keys are rounded before.
        beyond = (one - exact).abs() > (2.0**-4 + 2.0**-7) * exact.abs() + 2.0**-9 * scale
        # A norm that rounds a tie to the other side moves elements, and Triton's interpreter halves some.
        assert beyond.double().mean() < (0.02 if INTERPRETED else 2e-3)


def assert_steps(out, qkv, before, after, state, rows, rope, heads, order, close):
    """The outputs of a step of `rows` and their new keys and values, in float64; all else in the cache is as before."""
    live = [row for row, slot in enumerate(rows.tolist()) if int(state.position[slot]) != IDLE]
    slots = rows[live].long()
    position = state.position[slots].long()
    query, key, value, gates = parts(qkv[live], position, rope, heads)
    pages, places = state.pages[slots, position // PAGE].long(), position % PAGE
    assert_stored(after, pages, places, order, key, value, close)
    for number, row in enumerate(live):
        tokens = int(position[number]) + 1
        keys, values = (part[:tokens] for part in held(after, state.pages[slots[number]], order))
        gate, one = None if gates is None else gates[number, None], slice(number, number + 1)
        expected = attended(query[one], keys, values, gate, heads)[0]
        torch.testing.assert_close(out[row].double(), expected, **close)
    assert not out[[row for row in range(len(rows)) if row not in live]].any()
    unchanged = torch.ones(after.pages, PAGE, dtype=torch.bool, device=DEVICE)
    unchanged[pages, places] = False
    both = [cache.data.float().nan_to_num(7).permute(0, 3, 1, 2, 4)[unchanged] for cache in (before, after)]
    assert torch.equal(*both)


def close_in(dtype):
    return {"atol": 2e-2, "rtol": 1e-2} if dtype == torch.bfloat16 else {"atol": 2e-5, "rtol": 2e-5}
