"""Operations of a decode step and of log-probabilities in plain PyTorch.

CPUs use them, and the kernels are tested against them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from qerl.kernels.decode_state import IDLE, DecodeState, SamplingState
from qerl.kernels.geometry import CHUNK, PAGE, Heads, Norm
from qerl.kernels.kv_cache import KVCache
from qerl.kernels.packed_sequences import attend_masked, attend_packed
from qerl.kernels.prompts import PromptRow

_WORD = 0xFFFFFFFF


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """RMSNorm of x [B, H] in float32, rounded to the dtype of x."""
    wide = x.float()
    scale = norm.weight.float() if norm.noise is None else norm.weight.float() + norm.noise
    scale = scale + norm.offset if norm.offset else scale
    return (scale * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps))).to(x.dtype)


def add_normed(to: Tensor, x: Tensor, norm: Norm, then: Norm) -> Tensor:
    """Add the norm of x [B, H] to `to` [B, H] in place; returns the norm `then` of the sum."""
    return rms_norm(to.add_(rms_norm(x, norm)), then)


def clamped_glu(both: Tensor, alpha: float, limit: float) -> Tensor:
    """(up + 1) gate sigmoid(alpha gate) [B, N / 2] of gate and up [B, N], whose features alternate.

    gate is at most `limit`, and up is between -`limit` and `limit`.
    """
    gate, up = both.unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(gate * alpha)


def attend(
    qkv: Tensor,
    cache: KVCache,
    state: DecodeState,
    rows: Tensor,
    rope: tuple[Tensor, Tensor],
    heads: Heads,
    splits: int,
    drafted: bool = False,
) -> Tensor:
    """Append each token's key and value to the cache, and attend to all tokens so far.

    Returns [B, Hq * D], 0 for idle rows. `qkv` [B, `heads.width`] is of the slots `rows` [B], and `cache` that of the
    block. `rope` has cosines and sines [positions, R / 2] for the first R of a head's D elements;
    the others don't rotate. `splits` bounds the kernel's grid, and
    `drafted` says that slots may share pages that they write to, so that a row attends to tokens of other rows. Both
    have no effect here, where all tokens are appended first.
    """
    del splits, drafted
    position = state.position[rows].long()
    live = position != IDLE
    out = qkv.new_zeros(len(rows), heads.query * heads.dim)
    if live.any():
        rows, position = rows[live].long(), position[live]
        queries, keys, values, gates = heads.parts(qkv[live])
        angles = rope[0][position][:, None], rope[1][position][:, None]
        query = _rotate(_head_norm(queries, heads.q_norm, heads), *angles)
        key = _rotate(_head_norm(keys, heads.k_norm, heads), *angles)
        cache.put(state.pages[rows, position // PAGE].long(), position % PAGE, key, values)
        out[live] = gated(_over_pages(query, cache, state.pages[rows], position, heads), gates)
    return out


def attend_prompts(qkv: Tensor, cache: KVCache, row: PromptRow, rope: tuple[Tensor, Tensor], heads: Heads) -> Tensor:
    """Write keys and values of prompts to the cache and attend within each prompt; returns [n, Hq * D].

    qkv is [n, `heads.width`] and may be overwritten; cache and rope are as in `attend`.
    """
    queries, keys, values, gates = heads.parts(qkv)
    angles = rope[0][row.positions][:, None], rope[1][row.positions][:, None]
    query = _rotate(_head_norm(queries, heads.q_norm, heads), *angles)
    key = _rotate(_head_norm(keys, heads.k_norm, heads), *angles)
    key, value = cache.put(row.places // PAGE, row.places % PAGE, key, values)
    assert row.packing is not None
    out = attend_packed(query, key, value, row.packing, heads.scale, heads.window, heads.sinks).flatten(1)
    return gated(out, gates)


def gated(out: Tensor, gates: Tensor | None) -> Tensor:
    """out [n, Hq * D] times the sigmoid of the gates [n, Hq, D], if there are any."""
    return out if gates is None else out * gates.flatten(1).sigmoid()


def _over_pages(query: Tensor, cache: KVCache, pages: Tensor, position: Tensor, heads: Heads) -> Tensor:
    """Attention [B, Hq * D] of query [B, Hq, D] over the first position + 1 [B] tokens of `pages` [B, P]."""
    used = int(position.max()) // PAGE + 1
    # [B, P, 2, Hkv, PAGE, D] to keys and values [B, Hkv, P * PAGE, D]
    cached = cache.pages_of(pages[:, :used].long(), query.dtype).permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
    token = torch.arange(cached.shape[3], device=query.device)
    mask = token <= position[:, None]
    if heads.window is not None:
        mask &= token > position[:, None] - heads.window
    seen = mask[:, None, None]
    return attend_masked(query[:, :, None], cached[0], cached[1], seen, heads.scale, heads.sinks).flatten(1)


def _head_norm(x: Tensor, weight: Tensor | None, heads: Heads) -> Tensor:
    """RMSNorm of each head: normalised, rounded, then scaled as in Qwen3, or rounded once with an offset."""
    if weight is None:
        return x
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + heads.eps)
    scaled = (weight.float() + heads.norm_offset) * normed if heads.norm_offset else weight * normed.to(x.dtype)
    return scaled.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide, rotary = x.float(), 2 * cos.shape[-1]
    first, second = wide[..., :rotary].chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, wide[..., rotary:]], dim=-1).to(x.dtype)


def draw(
    logits: Tensor,
    rows: Tensor,
    state: DecodeState,
    sampling: SamplingState,
    truncated: bool,
    replayed: bool = False,
) -> None:
    """Draw a token from logits [B, V] for each slot of `rows` [B] that isn't idle, and advance the slots.

    A draw depends on (seed, sequence, number of the token) and the logits alone. Its log-probability is that of the
    distribution at the sampling temperature, before truncation by top-k and top-p (`truncated`). `replayed`: the token
    is the one that stands in `state.tokens` at its place.
    """
    live = state.position[rows] != IDLE
    rows, scaled = rows[live].long(), logits[live].float() * sampling.scale[0]
    noisy = scaled + sampling.scale[1] * gumbel(sampling.seed, state.sequence[rows], state.drawn[rows], logits.shape[1])
    if truncated:
        kept = logits[live].float() >= threshold(logits[live], sampling)[:, None]
        noisy = noisy.masked_fill(~kept, -torch.inf)
    token = state.tokens[rows, state.drawn[rows].long()].long() if replayed else noisy.argmax(-1)
    logprob = torch.log_softmax(scaled, dim=-1).gather(-1, token[:, None])[:, 0]
    _advance(token, logprob, rows, state, sampling)


def _advance(token: Tensor, logprob: Tensor, rows: Tensor, state: DecodeState, sampling: SamplingState) -> None:
    drawn = state.drawn[rows].long()
    state.tokens[rows, drawn] = token.int()
    state.logprobs[rows, drawn] = logprob
    state.token[rows] = token
    state.drawn[rows] = (drawn + 1).int()
    done = (token[:, None] == sampling.stops).any(-1) | (drawn + 1 >= state.limit[rows])
    state.position[rows] = torch.where(done, IDLE, state.position[rows] + 1).int()


def threshold(logits: Tensor, sampling: SamplingState) -> Tensor:
    """The smallest logit [B] that top-k and top-p keep; equal logits are kept or dropped together.

    A token is kept while the mass before it is below top_p; this is the smallest set with mass of at least top_p. The
    whole mass is that of the tokens that top-k keeps, as in vLLM and transformers.
    """
    ordered = logits.float().sort(dim=-1, descending=True).values
    first = torch.arange(logits.shape[1], device=logits.device) < sampling.top_k
    probs = torch.softmax((ordered * sampling.scale[0]).masked_fill(~first, -torch.inf), dim=-1)
    kept = first & ((probs.cumsum(-1) - probs < sampling.top_p) | (sampling.top_p >= 1))
    return ordered.gather(-1, kept.sum(-1, keepdim=True) - 1)[:, 0]


def gumbel(seed: Tensor, sequence: Tensor, number: Tensor, width: int) -> Tensor:
    """Gumbel noise [B, width] float32, a function of seed [1], sequence [B], number [B] and the column alone.

    It uses Philox with ten rounds, keyed by the seed; one counter gives the noise of four columns.
    """
    chunks, quarter = -(-width // CHUNK), CHUNK // 4
    counter = torch.arange(min(width, chunks * quarter), device=sequence.device)[None]
    words = philox([counter, *((x.long() & _WORD)[:, None] for x in (number, sequence, sequence >> 32))], seed)
    if width > quarter:
        word = torch.stack(words, dim=1).unflatten(-1, (chunks, quarter)).transpose(1, 2).flatten(1)[:, :width]
    else:
        word = words[0]
    uniform = ((word.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    # -log(1 - u) is precise near 0, where the largest noise comes from.
    exponential = torch.where(uniform < 2.0**-10, uniform * (1 + uniform * 0.5), -torch.log(1 - uniform))
    return -torch.log(exponential)


def philox(counter: list[Tensor], seed: Tensor) -> list[Tensor]:
    """Philox4x32-10 (Salmon et al. 2011): four random words from four counter words, as int64 tensors of 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(10):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return [c0, c1, c2, c3]


def _multiply(factor: int, words: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the products, computed in halves because int64 can't represent 64 unsigned bits."""
    low, high = words * (factor & 0xFFFF), words * (factor >> 16)
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & _WORD


def tile_statistics(
    tiles: Iterable[tuple[int, Tensor]], targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The target's logit, the log-sum-exp and the entropy of logits / temperature, each [rows].

    `tiles` are ranges of the vocabulary, each given by its first token and its logits [rows, columns], which are
    overwritten. `targets` [rows] are token ids. Results are float32, or float64 for float64 logits.

    The entropy combines those of the tiles: H = sum w (H_tile - log w), where w is the tile's probability. Log-sum-exp
    less the mean logit would be a small difference of large numbers.
    """
    parts = []
    for first, raw in tiles:
        logits = _scaled(raw, temperature)
        in_tile, places = _inside(targets, first, logits.shape[1])
        chosen = logits.gather(-1, places)[:, 0] * in_tile
        lse = logits.logsumexp(-1)
        logprobs = logits.sub_(lse[:, None])
        parts.append((chosen, lse, -logprobs.exp().mul_(logprobs).sum(-1)))
    chosen, lses, entropies = (torch.stack(column) for column in zip(*parts, strict=True))
    lse = lses.logsumexp(0)
    logs = lses - lse
    return chosen.sum(0), lse, (logs.exp() * (entropies - logs)).sum(0)


def tile_gradient(logits: Tensor, first: int, targets: Tensor, lse: Tensor, grad: Tensor, temperature: float) -> Tensor:
    """The gradient grad (1[target] - softmax) / temperature [rows, columns], in the dtype of `logits`.

    `logits` are overwritten. `first` is the tile's first token, `lse` [rows] comes from `tile_statistics`, and `grad`
    [rows] is the gradient of the log-probabilities.
    """
    x, grad = _scaled(logits, temperature), grad / temperature
    in_tile, places = _inside(targets, first, x.shape[1])
    x = x.sub_(lse[:, None]).exp_().mul_(-grad[:, None])
    return x.scatter_add_(-1, places, (grad * in_tile)[:, None]).to(logits.dtype)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)


def _inside(targets: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Whether each target is in the tile [rows], and its column in the tile [rows, 1], clamped if it isn't."""
    places = targets - first
    return (places >= 0) & (places < count), places.clamp(0, count - 1)[:, None]
