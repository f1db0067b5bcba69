"""Operations of steps that verify drafts in plain PyTorch.

CPUs use them, and the kernels (`qerl.kernels.drafts`) are tested against them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qerl.kernels.decode_state import IDLE, DecodeState, SamplingState
from qerl.kernels.draft_state import (
    LEAST_MATCH,
    LONG_MATCHES,
    LONGEST_MATCH,
    MATCH_UNIT,
    MOST_DRAFTED,
    NO_TOKEN,
    PRIOR_RIGHT,
    PRIOR_TESTED,
    DraftRows,
    DraftSource,
    DraftTotals,
    Guesses,
    TextState,
)


def keep(slots: Tensor, texts: TextState, state: DecodeState) -> None:
    """Copy the tokens that were drawn in `slots` [B] to their texts."""
    number = torch.arange(state.tokens.shape[1], device=slots.device)
    drawn = number < state.drawn[slots][:, None]
    place = torch.where(drawn, texts.places[4, slots][:, None] + number, 0)
    texts.tokens[place] = torch.where(drawn, state.tokens[slots], NO_TOKEN)


def guess(slots: Tensor, texts: TextState, state: DecodeState, sampling: SamplingState, totals: DraftTotals) -> Guesses:
    """Drafts for the sequences in `slots` [B] int64: the tokens behind the longest match in the texts of their group.

    Texts are first brought up to date. A draft ends before a stop token and where a text ends, and leaves room for the
    token that is drawn behind it. Chances follow from how many tokens of its kind were right so far.
    """
    keep(slots, texts, state)
    _, earlier, completions, _, line = texts.places[:, slots]
    drawn, live = state.drawn[slots].long(), state.position[slots] != IDLE
    best = match(slots, texts, state)
    length, place = best // (2 * MATCH_UNIT), best % MATCH_UNIT
    depth = torch.arange(1, MOST_DRAFTED + 1, device=slots.device)
    tokens = texts.tokens[place[:, None] + depth - 1]
    good = (tokens != NO_TOKEN) & (tokens[:, :, None] != sampling.stops).all(-1)
    most = (texts.most - drawn - 1).clamp(min=0)
    usable = torch.minimum(good.long().cumprod(1).sum(1), most) * (live & (length > 0))
    classes = torch.stack([length >= least for least in LONG_MATCHES]).sum(0)
    kind = _source(place, earlier, completions, line, line + drawn) * (1 + len(LONG_MATCHES)) + classes
    _, right, tested = totals.tried.T
    chance = (right + PRIOR_RIGHT).float() / (tested + PRIOR_TESTED)
    chances = chance[kind][:, None] ** depth * (depth <= usable[:, None])
    return Guesses(slots, live.long(), kind, tokens, chances)


def match(slots: Tensor, texts: TextState, state: DecodeState) -> Tensor:
    """Where in its texts each sequence's last tokens occurred: the longest match [B] int64 (MATCH_UNIT), or 0.

    Of matches of one length those are preferred behind which a whole draft follows, and of these the last one.
    """
    best = torch.zeros(len(slots), dtype=torch.int64, device=slots.device)
    bounds = torch.stack([texts.places[0, slots], texts.places[3, slots], texts.places[4, slots] + state.drawn[slots]])
    for row, (first, end, behind) in enumerate(bounds.T.tolist()):
        if not end or state.position[slots[row]] == IDLE:
            continue
        place = torch.arange(first + LONGEST_MATCH, end, device=slots.device)
        alive, length = texts.tokens[place] != NO_TOKEN, torch.zeros_like(place)
        for back in range(1, LONGEST_MATCH + 1):
            last = texts.tokens[behind - back]
            alive &= (texts.tokens[place - back] == last) & (last != NO_TOKEN)
            length += alive
        full = texts.tokens[place + MOST_DRAFTED - 1] != NO_TOKEN
        best[row] = torch.where(length >= LEAST_MATCH, (2 * length + full) * MATCH_UNIT + place, 0).max()
    return best


def _source(place: Tensor, earlier: Tensor, completions: Tensor, line: Tensor, behind: Tensor) -> Tensor:
    """The number of the source in whose text each place lies."""
    number = {source: n for n, source in enumerate(DraftSource)}
    itself = (place >= line - LONGEST_MATCH) & (place < behind)
    other = torch.where(itself, number[DraftSource.COMPLETION], number[DraftSource.SIBLING])
    kept = torch.where(place < completions, number[DraftSource.EARLIER], other)
    return torch.where(place < earlier, number[DraftSource.PROMPT], kept)


def spread(guesses: Guesses, ends: Tensor, state: DecodeState, rows: DraftRows, count: int, replayed: bool) -> None:
    """Fill the first `count` of `rows`: `ends` [B] int64 is for each of the slots the number of its last row, plus 1.

    Each row gets its sequence's state, moved ahead; rows beyond the last end become idle.
    """
    number = torch.arange(count, device=ends.device)
    sequence = torch.searchsorted(ends, number, right=True).clamp(max=len(ends) - 1)
    used = number < ends[-1]
    before = torch.where(sequence > 0, ends[sequence - 1], 0)
    ahead = torch.where(used, number - before, 0)
    slot = torch.where(used, guesses.slots[sequence], state.count)
    rows.slot[:count], rows.ahead[:count], rows.kind[:count] = slot, ahead, guesses.kind[sequence]
    rows.drafted[:count] = torch.where(ahead > 0, guesses.tokens[sequence, (ahead - 1).clamp(min=0)].long(), 0)
    of_row, position = rows.state, state.position[slot]
    of_row.position[:count] = torch.where(position != IDLE, position + ahead, IDLE).int()
    of_row.drawn[:count] = (state.drawn[slot] + ahead).int()
    of_row.token[:count] = torch.where(ahead > 0, rows.drafted[:count], state.token[slot])
    of_row.limit[:count], of_row.sequence[:count] = state.limit[slot], state.sequence[slot]
    of_row.pages[:count] = state.pages[slot]
    if replayed:
        of_row.tokens[:count] = state.tokens[slot]


def settle(rows: DraftRows, state: DecodeState, count: int, totals: DraftTotals) -> None:
    """Advance the sequences by their rows up to the first whose token the row before it didn't draw, and count.

    The first `count` of `rows` have drawn a token each.
    """
    slot, ahead, of_row, idle = rows.slot[:count], rows.ahead[:count], rows.state, state.count
    token, position, drawn = of_row.token[:count], of_row.position[:count], of_row.drawn[:count]
    place, guessed, live = torch.arange(count, device=slot.device), ahead > 0, slot != idle
    ended = position.roll(1) == IDLE
    wrongs = (guessed & ((token.roll(1) != rows.drafted[:count]) | ended)).cumsum(0)
    counts = live & (wrongs == wrongs[place - ahead])
    last = counts & ~(counts.roll(-1) & guessed.roll(-1))
    tried = torch.stack([guessed, guessed & counts, guessed & counts.roll(1) & ~ended], 1)
    totals.tried.index_add_(0, rows.kind[:count], tried.long())
    totals.steps.add_(torch.stack([live & ~guessed, live, counts]).sum(1))
    number = torch.where(counts, drawn - 1, 0).long()
    of_counted = torch.where(counts, slot, idle)
    state.tokens[of_counted, number] = token.int()
    state.logprobs[of_counted, number] = of_row.logprobs[place, number]
    of_last = torch.where(last, slot, idle)
    state.position[of_last] = torch.where(last, position, IDLE)
    state.drawn[of_last] = torch.where(last, drawn, 0)
    state.token[of_last] = torch.where(last, token, 0)
