"""Drafts that the device finds, against a search through lists of tokens."""

import numpy as np
import pytest
import torch

from qerl.kernels.reference import guess, keep, spread
from qerl.kernels.state import (
    IDLE,
    KINDS,
    MOST_DRAFTED,
    DecodeState,
    DraftRows,
    DraftSource,
    DraftTotals,
    Guesses,
    SamplingState,
)
from qerl.rollout.speculation import EarlierCompletions, TextLayout, Texts, allotted, expected, ranked

CPU = torch.device("cpu")
STOP, MOST_TOKENS, GROUP = 9, 40, 3


def state_of(prompts, earlier, completions):
    """Groups of completions, each in a slot of its own: texts, the slots' state and that of sampling."""
    count = len(prompts) * GROUP
    layout = TextLayout.of(prompts, GROUP, MOST_TOKENS, earlier)
    texts, state = Texts(len(layout.tokens), count, CPU), DecodeState.empty(count, MOST_TOKENS, 1, CPU)
    sampling = SamplingState.empty(CPU)
    sampling.set(temperature=1.0, seed=0, top_p=1.0, top_k=0, stops=[STOP])
    texts.fill(layout)
    texts.enter(torch.arange(count), [divmod(index, GROUP) for index in range(count)])
    for slot, tokens in enumerate(completions):
        state.tokens[slot, : len(tokens)] = torch.tensor(tokens).int()
        state.drawn[slot], state.position[slot] = len(tokens), 5
    return texts, state, sampling


def guesses_of(slots, texts, state, sampling):
    """Guesses for slots, and the number of tokens of each."""
    guesses = guess(torch.tensor(slots), texts.state, state, sampling, DraftTotals.empty(CPU))
    return guesses, (guesses.chances > 0).sum(1)


def searched(prompt, earlier, group, own):
    """The draft of a completion as (tokens, source, length of the match), or None."""
    before = prompt[-8:]
    named = [(DraftSource.PROMPT, prompt), *((DraftSource.EARLIER, before + tokens) for tokens in earlier)]
    for number, tokens in enumerate(group):
        named.append((DraftSource.COMPLETION if number == own else DraftSource.SIBLING, before + tokens))
    last, found = before + group[own], []
    for order, (source, text) in enumerate(named):
        for end in range(1, len(text)):
            length = 0
            while length < min(8, end, len(last)) and text[end - 1 - length] == last[-1 - length]:
                length += 1
            if length >= 2:
                found.append((length, len(text) - end >= MOST_DRAFTED, order, end, source))
    if not found:
        return None
    length, _, order, end, source = max(found)
    tokens = named[order][1][end : end + MOST_DRAFTED][: max(MOST_TOKENS - len(group[own]) - 1, 0)]
    return tokens[: tokens.index(STOP)] if STOP in tokens else tokens, source, length


@pytest.mark.parametrize("seed", range(8))
def test_drafts_are_those_of_a_search_through_all_texts(seed):
    numbers = np.random.default_rng(seed)
    letters = 2 + seed % 4

    def some(least, most):
        return numbers.integers(letters, size=numbers.integers(least, most, endpoint=True)).tolist()

    prompts, kept = [some(1, 20) for _ in range(4)], EarlierCompletions()
    earlier = [[some(0, 30) for _ in range(seed % 3)] for _ in prompts]
    for prompt, completed in zip(prompts, earlier, strict=True):
        kept.add(prompt, completed)
    completions = [some(1, MOST_TOKENS) + [STOP] * (n % 3 == 0) for n in range(len(prompts) * GROUP)]
    completions = [tokens[:MOST_TOKENS] for tokens in completions]
    texts, state, sampling = state_of(prompts, kept, completions)
    state.position[3] = IDLE
    guesses, length = guesses_of([*range(len(completions)), len(completions)], texts, state, sampling)
    assert length[-1] == length[3] == 0
    assert guesses.live.tolist() == [slot != 3 for slot in range(len(completions))] + [False]
    compared = set()
    for slot in range(len(completions)):
        group, own = divmod(slot, GROUP)
        members = completions[group * GROUP : (group + 1) * GROUP]
        # Prompts may be equal, and then all have the completions of the last one.
        found = searched(prompts[group], list(kept.of(prompts[group])), members, own)
        if found is None or not found[0] or slot == 3:
            assert length[slot] == 0
            continue
        tokens, source, matched = found
        assert guesses.tokens[slot, : length[slot]].tolist() == tokens
        assert guesses.kind[slot] == 3 * list(DraftSource).index(source) + (matched >= 4) + (matched >= 8)
        compared.add(source)
    assert len(compared) > 1


def test_texts_are_those_of_the_call_alone():
    """Those of the call before are gone, and slots without a sequence have none."""
    prompts = [[1, 2, 3, 4, 5]]
    texts, state, sampling = state_of(prompts, EarlierCompletions(), [[6, 7, 8], [6, 7], [1]])
    assert guesses_of([0, 1], texts, state, sampling)[0].tokens[1, 0] == 8
    texts.fill(TextLayout.of(prompts, GROUP, MOST_TOKENS, EarlierCompletions()))
    assert guesses_of([1], texts, state, sampling)[1].tolist() == [0]
    texts.enter(torch.tensor([0, 1]), [(0, 0), (0, 1)])
    assert guesses_of([1], texts, state, sampling)[1].tolist() == [0]
    keep(torch.tensor([0]), texts.state, state)
    assert guesses_of([1], texts, state, sampling)[0].tokens[0, 0] == 8


@pytest.mark.parametrize("seed", range(6))
def test_rows_go_to_every_sequence_and_then_to_the_likeliest_tokens(seed):
    numbers = torch.Generator().manual_seed(seed)
    slots, count = 12, 16 + 8 * seed

    def some(high, *size):
        return torch.randint(high, size, generator=numbers)

    live = (some(4, slots) > 0).long()
    length, chance = some(MOST_DRAFTED + 1, slots) * live, some(9, slots) / 10 + 0.05
    depth = torch.arange(1, MOST_DRAFTED + 1)
    chances = chance[:, None] ** depth * (depth <= length[:, None])
    guesses = Guesses(torch.arange(slots), live, some(KINDS, slots), some(90, slots, MOST_DRAFTED).int(), chances)
    order, likely = ranked(guesses)
    rows, state = DraftRows.empty(count, 1, 1, CPU), DecodeState.empty(slots, 1, 1, CPU)
    state.position[:-1], state.drawn[:-1] = 5 + some(9, slots).int(), some(9, slots).int()
    spread(guesses, allotted(guesses, order, likely, count), state, rows, count, False)
    wanted = min(count, int(live.sum() + length.sum()))
    assert (rows.slot[wanted:] == state.count).all()
    assert (rows.state.position[wanted:] == IDLE).all()
    taken = 0.0
    for slot in range(slots):
        mine = (rows.slot[:wanted] == slot).nonzero()[:, 0]
        more = max(len(mine) - 1, 0)
        assert (len(mine) > 0) == bool(live[slot])
        assert rows.ahead[mine].tolist() == list(range(len(mine)))
        assert (rows.state.position[mine] - rows.ahead[mine] == state.position[slot]).all()
        assert (rows.state.drawn[mine] - rows.ahead[mine] == state.drawn[slot]).all()
        assert rows.state.token[mine].tolist() == [0, *guesses.tokens[slot, :more].tolist()][: len(mine)]
        taken += chances[slot, :more].sum().item()
    best = chances.flatten().sort(descending=True).values[: wanted - int(live.sum())].sum().item()
    assert taken == pytest.approx(best, rel=1e-5)
    told = expected(guesses, likely, torch.tensor([1, count]))
    assert told.tolist() == pytest.approx([0, best], rel=1e-5)


def test_the_oldest_prompts_are_forgotten(monkeypatch):
    monkeypatch.setattr("qerl.rollout.speculation._KEPT_TOKENS", 10)
    kept = EarlierCompletions()
    kept.add([1], [[1] * 4])
    kept.add([2], [[2] * 4])
    kept.add([1], [[3] * 2])
    assert list(kept.of([1])) == [[1] * 4, [3] * 2]
    kept.add([3], [[4]])
    assert list(kept.of([2])) == []
    assert list(kept.of([1])) == [[1] * 4, [3] * 2]
