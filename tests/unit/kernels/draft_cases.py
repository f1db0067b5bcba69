"""The kernels of drafts against PyTorch: on a GPU, or in Triton's interpreter, which `test_interpreter.py` starts."""

import os

import pytest
import torch

from qerl.kernels import reference
from qerl.kernels.state import (
    IDLE,
    KINDS,
    LONGEST_MATCH,
    MOST_DRAFTED,
    NO_TOKEN,
    DecodeState,
    DraftRows,
    DraftTotals,
    Guesses,
    SamplingState,
    TextState,
)
from qerl.kernels.triton import sampling
from tests.conftest import in_nightly

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
SLOTS, TOKENS, PAGES, STOPS = 11, 700, 150, [1, 40]


def copied(value):
    """A dataclass of tensors with copies of these."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return type(value)(**{name: copied(part) for name, part in vars(value).items()})


def same(ours, theirs):
    """Whether all tensors of two dataclasses are equal; floats to rounding, and without the idle slot."""
    for name, part in vars(ours).items():
        other = getattr(theirs, name)
        if not isinstance(part, torch.Tensor):
            same(part, other)
        else:
            torch.testing.assert_close(part, other, rtol=1e-5, atol=0, msg=lambda text, name=name: f"{name}: {text}")


class Case:
    """Random texts of two groups, a state with some of their tokens, and counts."""

    def __init__(self, seed, letters):
        self.numbers = torch.Generator().manual_seed(seed)
        self.state = DecodeState.empty(SLOTS, TOKENS, PAGES, DEVICE)
        self.state.position[:-1] = torch.where(self.some(5, SLOTS) > 0, self.some(90, SLOTS), IDLE).int()
        self.state.drawn[:-1] = 1 + self.some(TOKENS - 1, SLOTS).int()
        self.state.token[:-1], self.state.limit[:-1] = self.some(letters, SLOTS), self.some(90, SLOTS).int()
        self.state.sequence[:-1], self.state.pages[:] = self.some(2**40, SLOTS), self.some(99, SLOTS + 1, PAGES).int()
        self.state.tokens[:-1] = self.some(letters, SLOTS, TOKENS).int()
        line, before = TOKENS + 2 * LONGEST_MATCH, 300
        self.texts = TextState.empty(60 + 2 * (2 * before + SLOTS * line), SLOTS, DEVICE)
        self.texts.most.fill_(TOKENS)
        for slot in range(SLOTS):
            first = LONGEST_MATCH + (slot % 2) * (2 * before + SLOTS * line)
            places = [first, first + before, first + 2 * before, first + 2 * before + (SLOTS // 2 + 1) * line]
            own = places[2] + slot // 2 * line + LONGEST_MATCH
            self.texts.places[:, slot] = torch.tensor([*places, own])
            self.texts.tokens[own - 4 : own] = self.some(letters, 4).int()
            for start in places[:2]:
                inside = slice(start + LONGEST_MATCH, start + before - LONGEST_MATCH)
                self.texts.tokens[inside] = self.some(letters, before - 2 * LONGEST_MATCH).int()
        self.texts.tokens[0] = NO_TOKEN
        self.sampling, self.totals = SamplingState.empty(DEVICE), DraftTotals.empty(DEVICE)
        self.sampling.set(temperature=1.0, seed=0, top_p=1.0, top_k=0, stops=STOPS)
        self.totals.tried[:, 2] = 10 + self.some(10, KINDS)
        self.totals.tried[:, 1] = self.some(10, KINDS)
        self.slots = torch.tensor([*range(SLOTS), SLOTS, SLOTS], device=DEVICE)[torch.randperm(SLOTS + 2).to(DEVICE)]

    def some(self, high, *size):
        return torch.randint(high, size, generator=self.numbers).to(DEVICE)


@pytest.mark.parametrize("letters", [3, *in_nightly(60)])
def test_guesses_are_those_of_the_reference(letters):
    ours, theirs = Case(letters, letters), Case(letters, letters)
    theirs.slots = ours.slots
    args = [(case.slots, case.texts, case.state, case.sampling, case.totals) for case in (ours, theirs)]
    same(sampling.guess(*args[0]), reference.guess(*args[1]))
    same(ours.texts, theirs.texts)
    assert (reference.guess(*args[1]).chances > 0).any()


@pytest.mark.parametrize(("count", "replayed"), [(16, True), (37, False), *in_nightly((64, False))])
def test_rows_and_what_follows_from_them_are_those_of_the_reference(count, replayed):
    """Many rows draw the token that was drafted behind them, a few end, and some are idle."""
    case = Case(count, 50)
    live = (case.state.position[case.slots] != IDLE).long()
    each = live * (1 + case.some(MOST_DRAFTED + 1, len(live)))
    ends = each.cumsum(0).clamp(max=count)
    tokens = case.some(50, len(live), MOST_DRAFTED).int()
    guesses = Guesses(case.slots, live, case.some(KINDS, len(live)), tokens, tokens.float())
    rows = [DraftRows.empty(count, TOKENS, PAGES, DEVICE) for _ in range(2)]
    sampling.spread(guesses, ends, case.state, rows[0], count, replayed)
    reference.spread(guesses, ends, case.state, rows[1], count, replayed)
    same(*rows)

    state, used = rows[0].state, rows[0].slot != SLOTS
    assert used.any()
    drawn = torch.where(case.some(4, count) > 0, rows[0].drafted.roll(-1), 77)
    state.token[:-1] = torch.where(used, drawn, 0)
    state.position[:-1] = torch.where(used & (case.some(6, count) > 0), state.position[:-1] + 1, IDLE).int()
    state.drawn[:-1] += used
    state.logprobs[:] = torch.rand(state.logprobs.shape, generator=case.numbers).to(DEVICE)
    ours, theirs = (copied(case.state), copied(case.totals)), (copied(case.state), copied(case.totals))
    sampling.settle(rows[0], ours[0], count, ours[1])
    reference.settle(rows[0], theirs[0], count, theirs[1])
    for name, part in vars(theirs[0]).items():
        end = (slice(None), slice(-1)) if name == "progress" else (slice(-1),)
        assert torch.equal(getattr(ours[0], name)[end], part[end]), name
    same(ours[1], theirs[1])
    assert theirs[1].steps[2] > theirs[1].steps[0] > 0
