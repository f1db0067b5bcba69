"""Completions of several turns: the engine and the eager sampler, against Hugging Face's passes over the whole text."""

from dataclasses import dataclass, field, replace
from math import inf

import pytest
import torch

from qerl.rl.packing import Sample, logprobs_and_entropy, micro_batch
from qerl.rollout import engine
from qerl.rollout.decoder import Pool
from qerl.rollout.sampler import SamplingParams
from tests.parity.family_models import adapted, forced
from tests.tiny import tiny_family, tiny_qwen2
from tests.unit.rollout.test_engine import PROMPTS, eager_of, in_float64, sampler_of, stop_at

CPU = torch.device("cpu")
#: One in ten tokens ends a turn; a reply has some of them, too.
STOPS = list(range(2, 12))
PARAMS = SamplingParams(max_tokens=100, count=2, seed=4, temperature=0.7)


@pytest.fixture(scope="module", params=["qwen2", "qwen3_5"])
def policy(request, tmp_path_factory):
    """The second one has delta nets, whose states go on in their slots."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    tiny_qwen2(folder) if request.param == "qwen2" else tiny_family(folder, "qwen3_5")
    return adapted(folder)


def most_turns(prompt, number):
    return 3 + 3 * ((prompt + number) % 3)


@dataclass
class Counted:
    """Replies to each turn with tokens that depend on those before.

    A reply comes after some calls, more for some completions, as from a slow tool. With `together` all come once no
    sequence is decoded.
    """

    delay: int = 0
    together: bool = False
    longest: int = 12
    asked: list = field(default_factory=list)
    texts: dict = field(default_factory=dict)
    seen: int = 0

    def ask(self, prompt, number, tokens):
        self.texts.setdefault((prompt, number), []).append(list(tokens))
        self.asked.append((self.seen + self.delay * (1 + (prompt + number) % 3), prompt, number, list(tokens)))

    def replies(self, wait):
        self.seen += 1
        assert self.asked or not wait, "a sampler waits for nothing"
        due = self.seen if not self.together else inf if wait else -1
        ready = [one for one in self.asked if one[0] <= due]
        self.asked = [one for one in self.asked if one[0] > due]
        return [(prompt, number, self.reply(prompt, number, tokens)) for _, prompt, number, tokens in ready]

    def reply(self, prompt, number, tokens):
        if len(self.texts[prompt, number]) == most_turns(prompt, number):
            return None
        return [
            STOPS[0],
            *(12 + (7 * sum(tokens) + place) % 80 for place in range(1 + sum(tokens) % (self.longest - 3))),
            STOPS[1],
            50,
        ]


def drawn(policy, make, room=(8,), turns=None, **settings):
    sampler, turns = make(policy, *room, **settings), turns or Counted()
    stop_at(policy, STOPS)
    return sampler.generate(PROMPTS, replace(PARAMS, turns=turns)), turns


@pytest.fixture
def crowded(monkeypatch):
    """The sequences that lose their slots while they wait for a reply."""
    seen, leave = [], engine.Scheduler._leave

    def noted(self, sequence):
        seen.extend([sequence.index] * (sequence.index in self._waiting))
        leave(self, sequence)

    monkeypatch.setattr(engine.Scheduler, "_leave", noted)
    return seen


def assert_of_stock(policy, groups, turns):
    """Masks are of what was replied, and log-probabilities of drawn tokens are those of a pass over the whole text."""
    stock = in_float64(policy.lm)
    for number, (prompt, group) in enumerate(zip(PROMPTS, groups, strict=True)):
        for place, completion in enumerate(group):
            ids, mask = completion.token_ids, completion.mask
            asked = turns.texts.get((number, place), [])
            again = Counted(longest=turns.longest, texts={(number, place): []})
            expected = [True] * len(ids)
            for tokens in asked:
                assert ids[: len(tokens)] == tokens
                assert tokens[-1] in STOPS
                again.texts[number, place].append(tokens)
                reply = again.reply(number, place, tokens)
                if reply is not None and len(tokens) + len(reply) < PARAMS.max_tokens:
                    assert ids[len(tokens) :][: len(reply)] == reply
                    expected[len(tokens) : len(tokens) + len(reply)] = [False] * len(reply)
            assert mask == expected
            # A stop token that was drawn ends a turn.
            assert sum(d and i in STOPS for i, d in zip(ids, mask, strict=True)) == len(asked)
            assert completion.finished == (len(asked) == most_turns(number, place))
            alone = forced(stock, prompt, ids, PARAMS.temperature) * torch.tensor(mask)
            near = 1e-4 if policy.lm.config.model_type == "qwen2" else 5e-4  # delta nets round more, also without turns
            torch.testing.assert_close(torch.tensor(completion.logprobs).double(), alone.double(), atol=near, rtol=0)


@pytest.mark.parametrize(
    ("make", "room", "delay"),
    [
        *((sampler_of, room, delay) for room, delay in (((3,), 0), ((8,), 3), ((3,), 20), ((8,), 200), ((8, 8), 20))),
        *((eager_of, room, 0) for room in ((8,), (4,))),
    ],
)
def test_turns_have_the_masks_and_logprobs_of_the_whole_text_whatever_waits(policy, crowded, make, room, delay):
    """What waits changes no token. Where the cache is short, it gives its pages to others."""
    if room == (8, 8) and policy.lm.config.model_type != "qwen2":
        pytest.skip("slots of delta nets have the pages of their longest sequences")
    groups, turns = drawn(policy, make, room, Counted(delay))
    assert_of_stock(policy, groups, turns)
    assert bool(crowded) == (room == (8, 8))
    expected, _ = drawn(policy, make)
    assert [[c.token_ids for c in group] for group in groups] == [[c.token_ids for c in group] for group in expected]
    assert len({len(completion.turns) for group in groups for completion in group}) > 1
    assert {completion.finished for group in groups for completion in group} == {True, False}


@pytest.mark.parametrize("settings", [{}, {"batch_invariant": True}], ids=str)
def test_replies_that_come_together_are_computed_together(policy, monkeypatch, settings):
    """In one pass, of some tokens to more than a page of them, unless a completion needs the bits of it alone."""
    passes, extend = [], Pool.extend

    def noted(self, texts, slots, ends):
        passes.append(list(map(len, texts)))
        extend(self, texts, slots, ends)

    monkeypatch.setattr(Pool, "extend", noted)
    groups, turns = drawn(policy, sampler_of, turns=Counted(together=True, longest=80), **settings)
    assert_of_stock(policy, groups, turns)
    together = policy.lm.config.model_type == "qwen2" and not settings
    assert bool(passes) == together
    assert not together or (max(map(len, passes)) > 4 and max(map(max, passes)) > 64)


@pytest.mark.parametrize("make", [sampler_of, eager_of])
def test_lengths_are_those_of_turns(policy, make):
    params = replace(PARAMS, turns=Counted(), lengths=((5, 7),) * 4, ignore_eos=True)
    groups = make(policy).generate(PROMPTS, params)
    for group in groups:
        for completion, length in zip(group, (5, 7), strict=True):
            assert {len(turn) for turn in completion.turns[:-1]} == {length}


def test_an_update_reads_the_drawn_tokens_alone(policy):
    groups, _ = drawn(policy, eager_of)
    samples = [Sample(p, c, 0.0, 0.0) for p, group in zip(PROMPTS, groups, strict=True) for c in group]
    batch = micro_batch(samples, list(range(8)), CPU)
    logprobs, entropies = logprobs_and_entropy(policy, batch, PARAMS.temperature)
    torch.testing.assert_close(logprobs, batch.sampler_logprobs_NT, atol=1e-4, rtol=0)
    mask = batch.mask_NT.bool()
    assert len(batch.targets_M) == mask.sum() == sum(sample.completion.drawn for sample in samples)
    assert not entropies[~mask].any()
    assert (entropies[mask] > 0).all()
    # A conversation is one row, with its prompt once for its group.
    assert batch.ids.numel() == sum(map(len, PROMPTS)) + sum(len(s.completion.token_ids) - 1 for s in samples)
