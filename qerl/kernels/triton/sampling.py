"""Token sampling and statistics of logits in Triton."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.reference import threshold
from qerl.kernels.state import CHUNK, DecodeState, SamplingState
from qerl.kernels.triton.launch import begin, dependent, kernel

# Token sampling in Triton; `qerl.kernels.reference` has the PyTorch version.
#
# The argmax of logits plus Gumbel noise has the softmax distribution, so one pass over the logits is enough. A program
# reads CHUNK logits of one row. A second launch combines the chunks and advances the sequence.

#: Less than any logit, but finite, so that the difference of two isn't NaN and a first tile is no special case.
_LOWEST = tl.constexpr(-1e30)


@triton.jit
def _log(x):
    """The logarithm of normal numbers by one instruction. Its error is 2^-22 near 1, where it isn't relative."""
    log2 = tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip
    return log2 * 0.6931471805599453


@triton.jit
def _gumbel(word):
    """Gumbel noise from a random word, as in `reference.gumbel` but for roundings."""
    uniform = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = uniform * (1.0 + uniform * (0.5 + uniform * (0.33333334 + uniform * 0.25)))
    exponential = tl.where(uniform < 0.015625, series, -_log(1.0 - uniform))
    return -_log(exponential)


@kernel
def _chunks(
    logits, rows, positions, drawn, sequence, runs, scale, seed, lowest, best, best_token, best_logit, top, mass,
    width, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TRUNCATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    begin(PDL)
    slot = tl.load(rows + row)
    if tl.load(positions + slot) < 0:
        return
    QUARTER: tl.constexpr = CHUNK // 4
    place = tl.arange(0, QUARTER)
    run = tl.load(runs + slot)
    inverse, noise = tl.load(scale + 2 * run), tl.load(scale + 2 * run + 1)
    key = tl.load(sequence + slot)
    zero = place * 0
    number = zero + tl.load(drawn + slot)
    low, high = zero + (key & 0xFFFFFFFF).to(tl.int32), zero + (key >> 32).to(tl.int32)
    words = tl.philox(tl.load(seed + run), chunk * QUARTER + place, number, low, high)
    start = logits + row.to(tl.int64) * width
    raws, peaks = (), tl.full([QUARTER], _LOWEST, tl.float32)
    for quarter in tl.static_range(4):
        column = chunk * CHUNK + quarter * QUARTER + place
        raw = tl.load(start + column, column < width, other=_LOWEST).to(tl.float32)
        raws, peaks = raws + (raw,), tl.maximum(peaks, raw)
    peak = tl.maximum(tl.max(peaks, axis=0) * inverse, _LOWEST)
    value = tl.full([QUARTER], 2.0 * _LOWEST, tl.float32)
    token = zero
    logit = tl.full([QUARTER], _LOWEST, tl.float32)
    total = tl.zeros([QUARTER], tl.float32)
    for quarter in tl.static_range(4):
        raw, column = raws[quarter], chunk * CHUNK + quarter * QUARTER + place
        allowed = column < width
        # A NaN stays one, and so reaches the log-probability, which the host reads.
        lifted = tl.maximum(raw * inverse, _LOWEST, propagate_nan=tl.PropagateNan.ALL)
        x = tl.where(allowed, lifted, _LOWEST)
        total += tl.where(allowed, tl.exp(x - peak), 0.0)
        if TRUNCATED:
            allowed = allowed & (raw >= tl.load(lowest + row))
        noisy = tl.where(allowed, x + noise * _gumbel(words[quarter]), 2.0 * _LOWEST)
        token = tl.where(noisy > value, column, token)
        logit = tl.where(noisy > value, x, logit)
        value = tl.maximum(noisy, value)
    part = row * CHUNKS + chunk
    winner = tl.max(value, axis=0)
    chosen = tl.min(tl.where(value == winner, token, 2147483647), axis=0)
    tl.store(best + part, winner)
    tl.store(best_token + part, chosen)
    tl.store(best_logit + part, tl.max(tl.where((value == winner) & (token == chosen), logit, _LOWEST), axis=0))
    tl.store(top + part, peak)
    tl.store(mass + part, tl.sum(total, axis=0))


@kernel
def _choose(
    logits, runs, scale, rows, best, best_token, best_logit, top, mass, positions, drawn, limit, given, last, tokens,
    logprobs, stops, width, stride, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, STOPS: tl.constexpr,
    REPLAYED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    begin(PDL)
    slot = tl.load(rows + row)
    position = tl.load(positions + slot)
    if position < 0:
        return
    chunk = tl.arange(0, BLOCK)
    inside = chunk < CHUNKS
    part = row * CHUNKS + chunk
    value = tl.load(best + part, inside, other=3.0 * _LOWEST)
    token = tl.load(best_token + part, inside, other=2147483647)
    logit = tl.load(best_logit + part, inside, other=_LOWEST)
    highest = tl.load(top + part, inside, other=_LOWEST)
    total = tl.load(mass + part, inside, other=0.0)
    count = tl.load(drawn + slot)
    chosen = tl.min(tl.where(value == tl.max(value, axis=0), token, 2147483647), axis=0)
    chosen_logit = tl.max(tl.where(token == chosen, logit, _LOWEST), axis=0)
    if REPLAYED:
        is_given = count < tl.load(given + slot)
        chosen = tl.where(is_given, tl.load(tokens + slot * stride + count, is_given, other=0), chosen)
        raw = tl.load(logits + row.to(tl.int64) * width + chosen).to(tl.float32)
        lifted = tl.maximum(raw * tl.load(scale + 2 * tl.load(runs + slot)), _LOWEST)
        chosen_logit = tl.where(is_given, lifted, chosen_logit)
    peak = tl.max(highest, axis=0)
    logprob = chosen_logit - peak - tl.log(tl.sum(total * tl.exp(highest - peak), axis=0))

    tl.store(tokens + slot * stride + count, chosen)
    tl.store(logprobs + slot * stride + count, logprob)
    tl.store(last + slot, chosen.to(tl.int64))
    tl.store(drawn + slot, count + 1)
    stop = tl.load(stops + tl.arange(0, STOPS))
    stopped = tl.max((stop == chosen).to(tl.int32), axis=0) > 0
    if REPLAYED:
        stopped = stopped & (is_given == 0)
    done = stopped | (count + 1 >= tl.load(limit + slot))
    tl.store(positions + slot, tl.where(done, -1, position + 1))


# The noise of a draw is a function of seed, sequence and token number alone. Products round by the batch's size, so
# only `native.batch_invariant` makes the logits independent of the batch, except for a sequence that was evicted: its
# cache is rounded like a prompt's.
def draw(
    logits: Tensor, rows: Tensor, state: DecodeState, sampling: SamplingState, truncated: bool, replayed: bool = False
) -> None:
    """See `reference.draw`."""
    batch, width = logits.shape
    chunks = triton.cdiv(width, CHUNK)
    parts = torch.empty(4, batch, chunks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(batch, chunks, dtype=torch.int32, device=logits.device)
    best, logit, top, mass = parts
    lowest = threshold(logits, state.run[rows].long(), sampling) if truncated else best
    pdl = dependent(logits.device)
    _chunks[(batch, chunks)](
        logits, rows, state.position, state.drawn, state.sequence, state.run, sampling.scale, sampling.seed,
        lowest, best, tokens, logit, top, mass, width, CHUNK=CHUNK, CHUNKS=chunks, TRUNCATED=truncated,
        num_warps=4, **pdl,
    )  # fmt: skip
    _choose[(batch,)](
        logits, state.run, sampling.scale, rows, best, tokens, logit, top, mass, state.position, state.drawn,
        state.limit, state.given, state.token, state.tokens, state.logprobs, sampling.stops, width,
        state.tokens.stride(0),
        CHUNKS=chunks, BLOCK=triton.next_power_of_2(chunks), STOPS=len(sampling.stops), REPLAYED=replayed,
        num_warps=1, **pdl,
    )  # fmt: skip


# Statistics and gradient of tiles of logits in Triton; `qerl.kernels.reference` has the PyTorch versions.
#
# Each kernel reads a tile once, as cuBLAS wrote it, and computes in float32 registers; the gradient overwrites the tile
# for the next product. These kernels follow cuBLAS, which doesn't use programmatic dependent launch.

#: Columns that a program has in registers at a time.
_LOGITS_BLOCK = 4096


@kernel
def _statistics(logits, targets, state, first, rows, width, inverse, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * width
    peak = tl.load(state + row)
    total = tl.load(state + rows + row)
    moment = tl.load(state + 2 * rows + row)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(line + column, inside, other=0.0).to(tl.float32) * inverse
        x = tl.where(inside, x, _LOWEST)
        rising = tl.maximum(peak, tl.max(x, axis=0))
        shift = peak - rising
        distance = x - rising
        mass = tl.exp(distance)
        moment = tl.exp(shift) * (moment + shift * total) + tl.sum(mass * distance, axis=0)
        total = tl.exp(shift) * total + tl.sum(mass, axis=0)
        peak = rising
    tl.store(state + row, peak)
    tl.store(state + rows + row, total)
    tl.store(state + 2 * rows + row, moment)
    place = tl.load(targets + row) - first
    in_tile = (place >= 0) & (place < width)
    tl.store(state + 3 * rows + row, tl.load(line + place, in_tile, other=0.0).to(tl.float32) * inverse, in_tile)


@kernel
def _gradient(
    logits, targets, lse, grad, entropy, grad_entropy, first, width, inverse, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * width
    place = tl.load(targets + row) - first
    level = tl.load(lse + row)
    scale = tl.load(grad + row) * inverse
    if ENTROPY:
        spread = tl.load(entropy + row)
        grad_spread = tl.load(grad_entropy + row) * inverse
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(line + column, inside, other=0.0).to(tl.float32) * inverse
        out = scale * ((column == place).to(tl.float32) - tl.exp(x - level))
        if ENTROPY:
            out -= grad_spread * tl.exp(x - level) * (x - level + spread)
        tl.store(line + column, out.to(logits.dtype.element_ty), inside)


def tile_statistics(
    tiles: Iterable[tuple[int, Tensor]], targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.tile_statistics`; tiles must be contiguous and aren't changed."""
    # For each row, the maximum m, S = sum exp(x - m), T = sum exp(x - m) (x - m) and the target's logit are carried
    # from tile to tile. The entropy log S - T / S is a sum of two non-negative terms relative to the maximum, and so
    # not a small difference of large numbers.
    rows = len(targets)
    state = torch.zeros(4, rows, dtype=torch.float32, device=targets.device)
    state[0] = _LOWEST.value
    targets = targets.contiguous()
    for first, logits in tiles:
        _statistics[(rows,)](
            logits, targets, state, first, rows, logits.shape[1], 1.0 / temperature, BLOCK=_LOGITS_BLOCK, num_warps=8
        )
    peak, total, moment, chosen = state
    return chosen, peak + total.log(), total.log() - moment / total


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
    """See `reference.tile_gradient`; it overwrites `logits`, which must be contiguous."""
    # Without a gradient of the entropy the kernel reads neither of the two.
    spread, grad_spread = (lse, lse) if entropy is None or grad_entropy is None else (entropy, grad_entropy)
    _gradient[(len(logits),)](
        logits, targets.contiguous(), lse.contiguous(), grad.contiguous(), spread.contiguous(),
        grad_spread.contiguous(), first, logits.shape[1], 1.0 / temperature,
        ENTROPY=grad_entropy is not None, BLOCK=_LOGITS_BLOCK, num_warps=8,
    )  # fmt: skip
    return logits
