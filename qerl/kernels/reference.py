"""What samplers and updates compute beside products with packed weights, in plain PyTorch.

These functions define the operations, and CPUs use them. `qerl.kernels.triton` has the same functions for GPUs, which
are tested against them; `operations` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from qerl.kernels.packed_sequences import attend_masked, attend_packed
from qerl.kernels.state import (
    CHUNK,
    IDLE,
    PAGE,
    DecodeState,
    DeltaHeads,
    DeltaState,
    Groups,
    Heads,
    KVCache,
    Norm,
    PromptRow,
    Rope,
    SamplingState,
    block_size,
    most_blocks,
)

_WORD = 0xFFFFFFFF

# Norms, gates and attention.


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """RMSNorm of x [B, H] in float32, rounded to the dtype of x."""
    wide = x.float()
    scale = norm.weight.float() if norm.noise is None else norm.weight.float() + norm.noise
    scale = scale + norm.offset if norm.offset else scale
    scale = scale if norm.runs is None else scale[norm.runs.rows.long()]
    return (scale * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps))).to(x.dtype)


def add_normed(to: Tensor, x: Tensor, norm: Norm, next_norm: Norm) -> Tensor:
    """Add the norm of x [B, H] to `to` [B, H] in place; returns the norm `next_norm` of the sum."""
    return rms_norm(to.add_(rms_norm(x, norm)), next_norm)


def clamped_glu(both: Tensor, alpha: float, limit: float) -> Tensor:
    """(up + 1) gate sigmoid(alpha gate) [B, N / 2] of gate and up [B, N], whose features alternate.

    gate is at most `limit`, and up is between -`limit` and `limit`.
    """
    gate, up = both.unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(gate * alpha)


def attend(
    qkv: Tensor, cache: KVCache, state: DecodeState, rows: Tensor, rope: Rope, heads: Heads, splits: int
) -> Tensor:
    """Append each token's key and value to the cache, and attend to all tokens so far.

    Returns [B, Hq * D], 0 for idle rows. `qkv` [B, `heads.width`] is of the slots `rows` [B], and `cache` that of the
    block. `rope` has cosines and sines [positions, R / 2] for the first R of a head's D elements;
    the others don't rotate. `splits` bounds the kernel's grid, and has no effect here.
    """
    del splits
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


def attend_prompts(qkv: Tensor, cache: KVCache, row: PromptRow, rope: Rope, heads: Heads) -> Tensor:
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
    # What a page has after a sequence's end may be NaN, of a cohort's run that diverged, and 0 times NaN is NaN.
    cached = cached.masked_fill(~mask[:, None, :, None], 0.0)
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


# Tokens and their log-probabilities.


def draw(
    logits: Tensor, rows: Tensor, state: DecodeState, sampling: SamplingState, truncated: bool, replayed: bool = False
) -> None:
    """Draw a token from logits [B, V] for each slot of `rows` [B] that isn't idle, and advance the slots.

    A draw depends on (seed, sequence, number of the token) and the logits alone. Its log-probability is that of the
    distribution at the sampling temperature, before truncation by top-k and top-p (`truncated`). `replayed`: one of
    the tokens `state.given` replaces the drawn one, and ends no sequence as a stop token.
    """
    live = state.position[rows] != IDLE
    rows = rows[live].long()
    run = state.run[rows].long()
    inverse, weight = sampling.scale[run, :, None].unbind(1)
    scaled = logits[live].float() * inverse
    noise = gumbel(sampling.seed[run, None], state.sequence[rows], state.drawn[rows], logits.shape[1])
    noisy = scaled + weight * noise
    if truncated:
        allowed = logits[live].float() >= threshold(logits[live], run, sampling)[:, None]
        noisy = noisy.masked_fill(~allowed, -torch.inf)
    token, given = noisy.argmax(-1), torch.zeros_like(rows, dtype=torch.bool)
    if replayed:
        given = state.drawn[rows] < state.given[rows]
        token = torch.where(given, state.tokens[rows, state.drawn[rows].long()].long(), token)
    logprob = torch.log_softmax(scaled, dim=-1).gather(-1, token[:, None])[:, 0]
    _advance(token, logprob, given, rows, state, sampling)


def _advance(
    token: Tensor, logprob: Tensor, given: Tensor, rows: Tensor, state: DecodeState, sampling: SamplingState
) -> None:
    drawn = state.drawn[rows].long()
    state.tokens[rows, drawn] = token.int()
    state.logprobs[rows, drawn] = logprob
    state.token[rows] = token
    state.drawn[rows] = (drawn + 1).int()
    done = (token[:, None] == sampling.stops).any(-1) & ~given | (drawn + 1 >= state.limit[rows])
    state.position[rows] = torch.where(done, IDLE, state.position[rows] + 1).int()


def threshold(logits: Tensor, run: Tensor, sampling: SamplingState) -> Tensor:
    """The smallest logit [B] that top-k and top-p of each row's run [B] keep; equal ones are kept or dropped together.

    A token is kept while the mass before it is below top_p; this is the smallest set with mass of at least top_p. The
    whole mass is that of the tokens that top-k keeps, as in vLLM and transformers.
    """
    ordered = logits.float().sort(dim=-1, descending=True).values
    inverse, top_k, top_p = sampling.scale[run, :1], sampling.top_k[run, None], sampling.top_p[run, None]
    first = torch.arange(logits.shape[1], device=logits.device) < top_k
    probs = torch.softmax((ordered * inverse).masked_fill(~first, -torch.inf), dim=-1)
    allowed = first & ((probs.cumsum(-1) - probs < top_p) | (top_p >= 1))
    last = (allowed.sum(-1, keepdim=True) - 1).clamp(min=0)  # of logits that are NaN, top-p keeps none
    return ordered.gather(-1, last)[:, 0]


def gumbel(seed: Tensor, sequence: Tensor, number: Tensor, width: int) -> Tensor:
    """Gumbel noise [B, width] float32, a function of seed [B, 1] or [1], sequence [B], number [B] and the column alone.

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
    # The entropies of the tiles combine: H = sum w (H_tile - log w), where w is the tile's probability.
    # Log-sum-exp less the mean logit would be a small difference of large numbers.
    logs = lses - lse
    return chosen.sum(0), lse, (logs.exp() * (entropies - logs)).sum(0)


def tile_gradient(
    logits: Tensor,
    first: int,
    targets: Tensor,
    lse: Tensor,
    grad: Tensor,
    temperature: float,
    entropy: Tensor | None = None,
    grad_entropy: Tensor | None = None,
) -> Tensor:
    """The gradient of the logits [rows, columns] by log-probabilities and entropies, in the dtype of `logits`.

    It is (grad (1[target] - p) - grad_entropy p (log p + entropy)) / temperature, p = softmax(logits / temperature).
    `logits` are overwritten. `first` is the tile's first token; `lse` and `entropy` [rows] come from
    `tile_statistics`; `grad` and `grad_entropy` [rows] are the gradients of log-probabilities and entropies. Without
    `grad_entropy` the second term is zero.
    """
    x, grad = _scaled(logits, temperature), grad / temperature
    in_tile, places = _inside(targets, first, x.shape[1])
    x = x.sub_(lse[:, None])
    if grad_entropy is None or entropy is None:
        x = x.exp_().mul_(-grad[:, None])
    else:
        x = -x.exp() * (grad[:, None] + (grad_entropy / temperature)[:, None] * (x + entropy[:, None]))
    return x.scatter_add_(-1, places, (grad * in_tile)[:, None]).to(logits.dtype)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)


def _inside(targets: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Whether each target is in the tile [rows], and its column in the tile [rows, 1], clamped if it isn't."""
    places = targets - first
    return (places >= 0) & (places < count), places.clamp(0, count - 1)[:, None]


# Gated delta nets of decode steps and prompts, token by token (Yang et al. 2025, Eq. 10). In the shapes n is the number
# of tokens, C channels, H value heads, K and V the features of a key and of a value.

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


# Mixtures of experts.


def scores(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Scores [T, E] of the experts for x [T, H] in float32, by a router's weight [E, H] and bias [E] in float32."""
    return torch.nn.functional.linear(x.float(), weight, bias)


def route(scores: Tensor, chosen: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """Numbers int32 [T, k] and weights float32 [T, k] of the experts with the highest scores [T, E], in float32.

    The weights are probabilities of a softmax over all experts; `normalised` ones add up to 1.
    """
    weights, numbers = torch.softmax(scores, -1, dtype=torch.float32).topk(chosen)
    return numbers.int(), weights / weights.sum(-1, keepdim=True) if normalised else weights


def group(numbers: Tensor, experts: int) -> Groups:
    """The pairs of tokens and their experts `numbers` [T, k], in blocks. Doesn't wait for the device."""
    tokens, chosen = numbers.shape
    count, size = tokens * chosen, block_size(tokens, chosen, experts)
    blocks = most_blocks(tokens, chosen, experts, size)
    expert, order = numbers.flatten().long().sort(stable=True)
    every = torch.arange(experts + 1, device=numbers.device)
    edges = torch.searchsorted(expert, every)
    ends = ((edges.diff() + size - 1) // size).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])
    place = starts[expert] * size + torch.arange(count, device=numbers.device) - edges[expert]
    pairs = torch.full((blocks * size,), count, dtype=torch.int32, device=numbers.device)
    pairs.scatter_(0, place, order.int())
    block = torch.arange(blocks, device=numbers.device)
    owner = torch.searchsorted(ends, block, right=True).int()
    return Groups(pairs.view(blocks, size), owner.where(owner < experts, -1), count, chosen)


def combine(y: Tensor, weights: Tensor, out: Tensor, residual: bool) -> None:
    """Write, or with `residual` add, the sums of y [T k, H] by weights [T, k] to out [T, H], in float32."""
    total = (y.view(*weights.shape, -1).float() * weights[..., None]).sum(1)
    out.copy_(total + out.float() if residual else total)


def combine_gradients(grad: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of y, in its dtype, and of the weights, in float32, of that of the sums [T, H] in `combine`."""
    grad_y = grad[:, None] * weights[..., None].to(y.dtype)
    grad_weights = torch.bmm(y.view(*weights.shape, -1), grad[..., None])[..., 0]
    return grad_y.view_as(y), grad_weights.to(weights.dtype)


def product(x: Tensor, groups: Groups, weight: Callable[[int], Tensor], bias: Tensor | None, out: Tensor) -> None:
    """Write out [pairs, N] = W x + b of each pair's expert, of x [T, K] by tokens or [pairs, K].

    `weight` gives an expert's W [N, K]; `bias` is [experts, N].
    """
    for number, pairs in _pairs_by_expert(groups):
        y = x[_rows(x, pairs, groups)] @ weight(number).T
        out[pairs] = y if bias is None else y + bias[number].to(y.dtype)


def input_gradient(grad: Tensor, groups: Groups, weight: Callable[[int], Tensor], out: Tensor) -> None:
    """Write the gradient out [pairs, K] of each pair's input, of that of its output by tokens [T, N] or [pairs, N]."""
    for number, pairs in _pairs_by_expert(groups):
        out[pairs] = grad[_rows(grad, pairs, groups)] @ weight(number)


def dense_product(weights: Tensor, x: Tensor, groups: Groups, out: Tensor) -> None:
    """Write out [pairs, N] = W x of each pair's expert, of dense weights [experts, N, K]."""
    product(x, groups, weights.__getitem__, None, out)


def dense_input_gradient(weights: Tensor, grad: Tensor, groups: Groups, out: Tensor, add: bool = False) -> None:
    """Write, or with `add` add, the gradient out [pairs, K] of each pair's input with weights [experts, N, K]."""
    gradient = torch.empty_like(out) if add else out
    input_gradient(grad, groups, weights.__getitem__, gradient)
    if add:
        out += gradient


def dense_weight_gradient(grad: Tensor, x: Tensor, groups: Groups, experts: int) -> Tensor:
    """The gradient [experts, N, K] of experts' weights, by outputs' gradients [pairs, N] and inputs x as in `product`.

    It is float32, or float64 if x is.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    out = x.new_zeros(experts, grad.shape[1], x.shape[1], dtype=wide)
    for number, pairs in _pairs_by_expert(groups):
        out[number] = grad[pairs].T.to(wide) @ x[_rows(x, pairs, groups)].to(wide)
    return out


def _pairs_by_expert(groups: Groups) -> list[tuple[int, Tensor]]:
    """Each expert that has pairs, and these."""
    experts = []
    for number in groups.experts.unique().tolist():
        pairs = groups.pairs[groups.experts == number].flatten()
        if number >= 0:
            experts.append((number, pairs[pairs < groups.count].long()))
    return experts


def _rows(x: Tensor, pairs: Tensor, groups: Groups) -> Tensor:
    """The rows of x that pairs read: their own, or those of their tokens."""
    return pairs if len(x) == groups.count else pairs // groups.chosen
