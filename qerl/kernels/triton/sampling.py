"""Token sampling, statistics of logits and the checks of drafts in Triton."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels import state as sizes
from qerl.kernels.reference import threshold
from qerl.kernels.state import CHUNK, DecodeState, DraftRows, DraftTotals, Guesses, SamplingState, TextState
from qerl.kernels.triton.launch import begin, dependent

# Token sampling in Triton; `qerl.kernels.reference` has the PyTorch version.
#
# The argmax of logits plus Gumbel noise has the softmax distribution, so one pass over the logits is enough. A program
# reads CHUNK logits of one row. A second launch combines the chunks and advances the sequence.

#: Less than any logit, but finite, so that the difference of two isn't NaN.
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


@triton.jit
def _chunks(
    logits, rows, positions, drawn, sequence, scale, seed, lowest, best, best_token, best_logit, top, mass,
    width, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TRUNCATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    begin(PDL)
    slot = tl.load(rows + row)
    if tl.load(positions + slot) < 0:
        return
    QUARTER: tl.constexpr = CHUNK // 4
    place = tl.arange(0, QUARTER)
    inverse, noise = tl.load(scale), tl.load(scale + 1)
    key = tl.load(sequence + slot)
    zero = place * 0
    number = zero + tl.load(drawn + slot)
    low, high = zero + (key & 0xFFFFFFFF).to(tl.int32), zero + (key >> 32).to(tl.int32)
    words = tl.philox(tl.load(seed), chunk * QUARTER + place, number, low, high)
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


@triton.jit
def _choose(
    logits, scale, rows, best, best_token, best_logit, top, mass, positions, drawn, limit, last, tokens, logprobs,
    stops, width, stride, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, STOPS: tl.constexpr, REPLAYED: tl.constexpr,
    PDL: tl.constexpr,
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
    if REPLAYED:
        chosen = tl.load(tokens + slot * stride + count)
        raw = tl.load(logits + row.to(tl.int64) * width + chosen).to(tl.float32)
        chosen_logit = tl.maximum(raw * tl.load(scale), _LOWEST)
    else:
        chosen = tl.min(tl.where(value == tl.max(value, axis=0), token, 2147483647), axis=0)
        chosen_logit = tl.max(tl.where(token == chosen, logit, _LOWEST), axis=0)
    peak = tl.max(highest, axis=0)
    logprob = chosen_logit - peak - tl.log(tl.sum(total * tl.exp(highest - peak), axis=0))

    tl.store(tokens + slot * stride + count, chosen)
    tl.store(logprobs + slot * stride + count, logprob)
    tl.store(last + slot, chosen.to(tl.int64))
    tl.store(drawn + slot, count + 1)
    stop = tl.load(stops + tl.arange(0, STOPS))
    stopped = tl.max((stop == chosen).to(tl.int32), axis=0)
    done = (stopped > 0) | (count + 1 >= tl.load(limit + slot))
    tl.store(positions + slot, tl.where(done, -1, position + 1))


# The noise of a draw is a function of seed, sequence and token number alone. Products round by the batch's size, so
# only `native.batch_invariant` makes the logits independent of the batch, except for a sequence that was evicted: its
# cache is rounded like a prompt's.
def draw(
    logits: Tensor,
    rows: Tensor,
    state: DecodeState,
    sampling: SamplingState,
    truncated: bool,
    replayed: bool = False,
) -> None:
    """See `reference.draw`."""
    batch, width = logits.shape
    chunks = triton.cdiv(width, CHUNK)
    parts = torch.empty(4, batch, chunks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(batch, chunks, dtype=torch.int32, device=logits.device)
    best, logit, top, mass = parts
    lowest = threshold(logits, sampling) if truncated else best
    pdl = dependent(logits.device)
    _chunks[(batch, chunks)](
        logits, rows, state.position, state.drawn, state.sequence, sampling.scale, sampling.seed, lowest,
        best, tokens, logit, top, mass, width, CHUNK=CHUNK, CHUNKS=chunks, TRUNCATED=truncated, num_warps=4, **pdl,
    )  # fmt: skip
    _choose[(batch,)](
        logits, sampling.scale, rows, best, tokens, logit, top, mass, state.position, state.drawn, state.limit,
        state.token, state.tokens, state.logprobs, sampling.stops, width, state.tokens.stride(0), CHUNKS=chunks,
        BLOCK=triton.next_power_of_2(chunks), STOPS=len(sampling.stops), REPLAYED=replayed, num_warps=1, **pdl,
    )  # fmt: skip


# Statistics and gradient of tiles of logits in Triton; `qerl.kernels.reference` has the PyTorch versions.
#
# Each kernel reads a tile once, as cuBLAS wrote it, and computes in float32 registers; the gradient overwrites the tile
# for the next product. These kernels follow cuBLAS, which doesn't use programmatic dependent launch.

#: Columns that a program has in registers at a time.
_LOGITS_BLOCK = 4096

#: Less than any logit, but finite, so that the difference of two isn't NaN and the first tile is no special case.


@triton.jit
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


@triton.jit
def _gradient(
    logits,
    targets,
    lse,
    grad,
    entropy,
    grad_entropy,
    first,
    width,
    inverse,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
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


# Operations of steps that verify drafts in Triton; `qerl.kernels.reference` has the PyTorch version.
#
# Texts are read whole, without an index: those of a group are some ten thousand tokens, which the caches hold. All else
# is a few numbers for each sequence or row, so that its time is that of a launch.

#: Programs of a sequence that look for matches, and places at which one of them looks at a time.
_PARTS, _DRAFT_BLOCK = 32, 512
_NONE = tl.constexpr(sizes.NO_TOKEN)
_LONGEST, _LEAST = tl.constexpr(sizes.LONGEST_MATCH), tl.constexpr(sizes.LEAST_MATCH)
_MOST, _UNIT = tl.constexpr(sizes.MOST_DRAFTED), tl.constexpr(sizes.MATCH_UNIT)
_LONG, _LONGER = (tl.constexpr(length) for length in sizes.LONG_MATCHES)
_RIGHT, _TESTED = tl.constexpr(sizes.PRIOR_RIGHT), tl.constexpr(sizes.PRIOR_TESTED)
_PROMPT, _COMPLETION, _SIBLING, _EARLIER = (tl.constexpr(number) for number in range(len(sizes.DraftSource)))


@triton.jit
def _keep(slots, texts, line, drawn, tokens, stride, BLOCK: tl.constexpr):
    slot = tl.load(slots + tl.program_id(0))
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = number < tl.load(drawn + slot)
    tl.store(texts + tl.load(line + slot) + number, tl.load(tokens + slot * stride + number, inside), inside)


def keep(slots: Tensor, texts: TextState, state: DecodeState) -> None:
    """See `reference.keep`."""
    most = state.tokens.shape[1]
    _keep[(len(slots), triton.cdiv(most, _DRAFT_BLOCK))](
        slots, texts.tokens, texts.places[4], state.drawn, state.tokens, state.tokens.stride(0), BLOCK=_DRAFT_BLOCK
    )


@triton.jit
def _match(slots, texts, places, stride, position, drawn, parts, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """The longest match in some of a sequence's texts."""
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    first, end = tl.load(places + slot), tl.load(places + 3 * stride + slot)
    end = tl.where(tl.load(position + slot) < 0, 0, end)
    last = texts + tl.load(places + 4 * stride + slot) + tl.load(drawn + slot)
    lane = tl.arange(0, BLOCK)
    highest = tl.zeros([BLOCK], tl.int64)
    for start in range(first + _LONGEST + part * BLOCK, end, PARTS * BLOCK):
        place = start + lane
        inside = place < end
        alive = (tl.load(texts + place, inside, other=_NONE) != _NONE).to(tl.int64)
        length = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(1, _LONGEST + 1):
            token = tl.load(last - back)
            same = (tl.load(texts + place - back, inside, other=_NONE) == token) & (token != _NONE)
            alive = tl.where(same, alive, 0)
            length += alive
        full = (tl.load(texts + place + _MOST - 1, inside, other=_NONE) != _NONE).to(tl.int64)
        score = (2 * length + full) * _UNIT + place
        highest = tl.maximum(highest, tl.where(length >= _LEAST, score, 0))
    tl.store(parts + row * PARTS + part, tl.max(highest, axis=0))


@triton.jit
def _guess(
    slots, texts, places, stride, most, position, drawn, stops, tried, parts, live, kinds, tokens, chances,
    PARTS: tl.constexpr, STOPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    best = tl.max(tl.load(parts + row * PARTS + tl.arange(0, PARTS)), axis=0)
    length, place = best // (2 * _UNIT), best % _UNIT
    depth = tl.arange(0, BLOCK)
    inside = depth < _MOST
    token = tl.load(texts + place + depth, inside, other=_NONE)
    ends = token == _NONE
    for stop in tl.static_range(STOPS):
        ends = ends | (token == tl.load(stops + stop))
    count = tl.load(drawn + slot)
    alive = tl.load(position + slot) >= 0
    usable = tl.min(tl.where(ends | (depth >= _MOST), depth, BLOCK), axis=0)
    usable = tl.minimum(usable, tl.maximum(tl.load(most) - count - 1, 0).to(tl.int32))
    usable = tl.where(alive & (length > 0), usable, 0)

    earlier, completions = tl.load(places + stride + slot), tl.load(places + 2 * stride + slot)
    line = tl.load(places + 4 * stride + slot)
    itself = (place >= line - _LONGEST) & (place < line + count)
    source = tl.where(itself, _COMPLETION, _SIBLING)
    source = tl.where(place < completions, _EARLIER, source)
    source = tl.where(place < earlier, _PROMPT, source)
    kind = source * 3 + (length >= _LONG).to(tl.int32) + (length >= _LONGER).to(tl.int32)
    right, tested = tl.load(tried + kind * 3 + 1), tl.load(tried + kind * 3 + 2)
    chance = (right + _RIGHT).to(tl.float32) / (tested + _TESTED).to(tl.float32)
    power = chance
    chanced = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(_MOST):
        chanced = tl.where((depth == number) & (number < usable), power, chanced)
        power = power * chance
    tl.store(live + row, alive.to(tl.int64))
    tl.store(kinds + row, kind.to(tl.int64))
    tl.store(tokens + row * _MOST + depth, token, inside)
    tl.store(chances + row * _MOST + depth, chanced, inside)


def guess(slots: Tensor, texts: TextState, state: DecodeState, sampling: SamplingState, totals: DraftTotals) -> Guesses:
    """See `reference.guess`."""
    keep(slots, texts, state)
    count, device = len(slots), slots.device
    parts = torch.empty(count, _PARTS, dtype=torch.int64, device=device)
    live, kind = torch.empty(2, count, dtype=torch.int64, device=device)
    tokens = torch.empty(count, sizes.MOST_DRAFTED, dtype=torch.int32, device=device)
    chances = torch.empty(count, sizes.MOST_DRAFTED, dtype=torch.float32, device=device)
    stride = texts.places.stride(0)
    _match[(count, _PARTS)](
        slots, texts.tokens, texts.places, stride, state.position, state.drawn, parts, BLOCK=_DRAFT_BLOCK, PARTS=_PARTS
    )
    _guess[(count,)](
        slots, texts.tokens, texts.places, stride, texts.most, state.position, state.drawn, sampling.stops,
        totals.tried, parts, live, kind, tokens, chances, PARTS=_PARTS, STOPS=len(sampling.stops),
        BLOCK=triton.next_power_of_2(sizes.MOST_DRAFTED + 1), num_warps=1,
    )  # fmt: skip
    return Guesses(slots, live, kind, tokens, chances)


@triton.jit
def _spread(
    slots, ends, kinds, tokens, count, idle, position, drawn, token, limit, sequence, pages, drawn_tokens,
    row_slot, row_ahead, row_drafted, row_kind, row_position, row_drawn, row_token, row_limit, row_sequence, row_pages,
    row_tokens, pages_stride, tokens_stride, width, most, COUNT: tl.constexpr, BLOCK: tl.constexpr,
    REPLAYED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    lane = tl.arange(0, COUNT)
    end = tl.load(ends + lane, lane < count, other=0)
    total = tl.max(end, axis=0)
    index = tl.sum(((end <= row) & (lane < count)).to(tl.int32), axis=0)
    before = tl.max(tl.where(end <= row, end, 0), axis=0)
    used = row < total
    index = tl.minimum(index, count - 1)
    ahead = tl.where(used, row - before, 0)
    slot = tl.where(used, tl.load(slots + index), idle)
    drafted = tl.load(tokens + index * _MOST + ahead - 1, ahead > 0, other=0).to(tl.int64)
    place = tl.load(position + slot)
    tl.store(row_slot + row, slot)
    tl.store(row_ahead + row, ahead)
    tl.store(row_drafted + row, drafted)
    tl.store(row_kind + row, tl.load(kinds + index))
    tl.store(row_position + row, tl.where(place >= 0, place + ahead, place).to(tl.int32))
    tl.store(row_drawn + row, (tl.load(drawn + slot) + ahead).to(tl.int32))
    tl.store(row_token + row, tl.where(ahead > 0, drafted, tl.load(token + slot)))
    tl.store(row_limit + row, tl.load(limit + slot))
    tl.store(row_sequence + row, tl.load(sequence + slot))
    for start in range(0, width, BLOCK):
        number = start + tl.arange(0, BLOCK)
        value = tl.load(pages + slot * pages_stride + number, number < width)
        tl.store(row_pages + row * pages_stride + number, value, number < width)
    if REPLAYED:
        for start in range(0, most, BLOCK):
            number = start + tl.arange(0, BLOCK)
            value = tl.load(drawn_tokens + slot * tokens_stride + number, number < most)
            tl.store(row_tokens + row * tokens_stride + number, value, number < most)


def spread(guesses: Guesses, ends: Tensor, state: DecodeState, rows: DraftRows, count: int, replayed: bool) -> None:
    """See `reference.spread`."""
    of_row = rows.state
    _spread[(count,)](
        guesses.slots, ends, guesses.kind, guesses.tokens, len(ends), state.count, state.position, state.drawn,
        state.token, state.limit, state.sequence, state.pages, state.tokens, rows.slot, rows.ahead, rows.drafted,
        rows.kind, of_row.position, of_row.drawn, of_row.token, of_row.limit, of_row.sequence, of_row.pages,
        of_row.tokens, state.pages.stride(0), state.tokens.stride(0), state.pages.shape[1], state.tokens.shape[1],
        COUNT=triton.next_power_of_2(len(ends)), BLOCK=128, REPLAYED=replayed, num_warps=1,
    )  # fmt: skip


@triton.jit
def _settle(
    row_slot, row_ahead, row_drafted, row_kind, row_position, row_drawn, row_token, row_logprobs, row_stride,
    position, drawn, token, tokens, logprobs, stride, tried, steps, count, idle,
):  # fmt: skip
    row = tl.program_id(0)
    slot, ahead = tl.load(row_slot + row), tl.load(row_ahead + row)
    live = slot != idle
    led = live  # only right tokens led to the row's own drafted token
    for back in tl.static_range(1, _MOST):
        exists = ahead > back
        guessed = tl.load(row_drafted + row - back, exists, other=0)
        before = tl.load(row_token + row - back - 1, exists, other=0)
        led = led & (guessed == before) & (tl.load(row_position + row - back - 1, exists, other=0) >= 0)
    guess = ahead > 0
    before = tl.load(row_token + row - 1, guess, other=0)
    tested = led & (tl.load(row_position + row - 1, guess, other=0) >= 0)
    counts = tested & (tl.load(row_drafted + row, guess, other=0) == before)
    drew, drew_at = tl.load(row_token + row), tl.load(row_position + row)
    next_exists = row + 1 < count
    follows = tl.load(row_ahead + row + 1, next_exists, other=0) > 0
    follows = follows & (tl.load(row_drafted + row + 1, next_exists, other=0) == drew) & (drew_at >= 0)
    last = counts & (follows == 0)
    number = tl.load(row_drawn + row) - 1
    logprob = tl.load(row_logprobs + row * row_stride + number, counts, other=0.0)
    tl.store(tokens + slot * stride + number, drew.to(tl.int32), counts)
    tl.store(logprobs + slot * stride + number, logprob, counts)
    tl.store(position + slot, drew_at, last)
    tl.store(drawn + slot, number + 1, last)
    tl.store(token + slot, drew, last)
    of_kind, one = tried + tl.load(row_kind + row) * 3, slot * 0 + 1
    tl.atomic_add(of_kind, one, guess, sem="relaxed")
    tl.atomic_add(of_kind + 1, one, guess & counts, sem="relaxed")
    tl.atomic_add(of_kind + 2, one, guess & tested, sem="relaxed")
    tl.atomic_add(steps, one, live & (ahead == 0), sem="relaxed")
    tl.atomic_add(steps + 1, one, live, sem="relaxed")
    tl.atomic_add(steps + 2, one, counts, sem="relaxed")


def settle(rows: DraftRows, state: DecodeState, count: int, totals: DraftTotals) -> None:
    """See `reference.settle`."""
    of_row = rows.state
    _settle[(count,)](
        rows.slot, rows.ahead, rows.drafted, rows.kind, of_row.position, of_row.drawn, of_row.token, of_row.logprobs,
        of_row.logprobs.stride(0), state.position, state.drawn, state.token, state.tokens, state.logprobs,
        state.tokens.stride(0), totals.tried, totals.steps, count, state.count, num_warps=1,
    )  # fmt: skip
