"""Verified drafts on a CPU, where the same code runs without graphs: completions are those of plain steps."""

import numpy as np
import pytest
import torch

from qerl.policy.policy import with_adapter
from qerl.rl.noise import Noise
from qerl.rollout.engine import scheduler, speculation
from qerl.rollout.engine.drafts import DraftSource, EarlierCompletions
from qerl.rollout.engine.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.rollout import NativeSettings
from qerl.settings.training import AdapterSettings, NoiseSettings
from tests.tiny import tiny_qwen3

#: Repetitive ones, so that drafts are found; one, less than one, exactly one, and more than one page.
PROMPTS = [[5, 6, 7] * 5, [8, 8], list(range(2, 18)) * 4, [9, 10, 11, 12, 13, 14, 15] * 20]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    torch.manual_seed(0)
    policy = with_adapter(tiny_qwen3(tmp_path_factory.mktemp("m")), AdapterSettings(rank=4), "float32", 0, CPU)
    for _, parameter in policy.trainable():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return policy


def sampler_of(policy, drafts, max_sequences=8, pages=None, stops=(), **settings):
    policy.lm.generation_config.eos_token_id = list(stops)
    if pages is not None:
        config = policy.lm.config
        width = config.num_key_value_heads * policy.lm.model.layers[0].self_attn.head_dim
        settings["kv_cache_gib"] = (pages + 0.5) * config.num_hidden_layers * 2 * width * 64 * 4 / 2**30
    return EngineSampler(policy, NativeSettings(drafts=drafts, **settings), max_sequences)


def tokens(groups):
    return [[completion.token_ids for completion in group] for group in groups]


def logprobs(groups):
    return np.concatenate([completion.logprobs for group in groups for completion in group])


def mistaken(completion, at):
    """The tokens of a completion, of which every eleventh is another one."""
    return [token ^ 1 if place % 11 == at else token for place, token in enumerate(completion.token_ids)]


def with_guesses(policy, plain, **settings):
    """A sampler that remembers the completions to come, with mistakes."""
    sampler = sampler_of(policy, True, **settings)
    for prompt, group in zip(PROMPTS, plain, strict=True):
        sampler.earlier.add(prompt, [mistaken(completion, at) for at, completion in enumerate(group)])
    return sampler


CASES = {
    "warm": ({"temperature": 1.0}, {}),
    "greedy": ({"temperature": 0.0}, {}),
    "top-p": ({"temperature": 0.8, "top_p": 0.7}, {}),
    "top-k": ({"temperature": 0.8, "top_k": 3}, {}),
    "stop tokens": ({}, {"stops": range(2, 4)}),
    "refill": ({}, {"max_sequences": 3}),
    "few pages": ({}, {"pages": 10}),
    "lengths": ({"lengths": ((3, 20), (70, 1), (9, 70), (33, 12))}, {}),
    "one token": ({"max_tokens": 1}, {}),
}


@pytest.fixture
def free_rows(monkeypatch):
    """Rows cost nothing, so that all drafts are verified."""
    monkeypatch.setattr(speculation, "_DOUBLING_ROWS", 1e9)
    monkeypatch.setattr(speculation, "_VERIFICATION", 0)
    monkeypatch.setattr(speculation, "_OF_SEQUENCE", 0)
    monkeypatch.setattr(speculation, "_PAUSES", (0, 0))


@pytest.mark.parametrize(("sampling", "settings"), CASES.values(), ids=CASES)
@pytest.mark.usefixtures("free_rows")
def test_completions_are_those_of_plain_steps(policy, sampling, settings):
    params = SamplingParams(**{"max_tokens": 70, "count": 2, "seed": 4} | sampling)
    with Noise(policy.lm, NoiseSettings(schedule="constant", sigma_start=0.1), seed=0).at(1, 10):
        plain = sampler_of(policy, False, **settings).generate(PROMPTS, params)
        sampler = with_guesses(policy, plain, **settings)
        drafted = sampler.generate(PROMPTS, params)
    assert tokens(drafted) == tokens(plain)
    assert [[c.finished for c in group] for group in drafted] == [[c.finished for c in group] for group in plain]
    np.testing.assert_allclose(logprobs(drafted), logprobs(plain), atol=1e-4)
    earlier = sampler.drafts.sources[DraftSource.EARLIER]
    if params.max_tokens > 1:
        assert earlier.accepted > 25
        assert earlier.verified - earlier.accepted > 10


def test_all_bits_are_those_of_plain_steps_where_asked(policy):
    params, settings = SamplingParams(max_tokens=70, count=2, seed=4), {"max_sequences": 20, "batch_invariant": True}
    plain = sampler_of(policy, False, **settings).generate(PROMPTS, params)
    sampler = with_guesses(policy, plain, **settings)
    assert sampler.generate(PROMPTS, params) == plain
    assert sampler.drafts.sources[DraftSource.EARLIER].accepted > 50


@pytest.mark.usefixtures("free_rows")
def test_interrupted_sequences_go_on_with_drafts(policy, monkeypatch):
    interrupted = []
    interrupt = scheduler.Scheduler._interrupt
    monkeypatch.setattr(
        scheduler.Scheduler, "_interrupt", lambda self, s: (interrupted.append(s.drawn), interrupt(self, s))
    )
    params = SamplingParams(max_tokens=100, count=2, seed=3)
    plain = sampler_of(policy, False).generate(PROMPTS, params)
    sampler = with_guesses(policy, plain, pages=10)
    assert tokens(sampler.generate(PROMPTS, params)) == tokens(plain)
    assert any(drawn > 1 for drawn in interrupted)
    assert sampler.drafts.steps > 10


@pytest.mark.usefixtures("free_rows")
def test_a_replay_with_drafts_is_the_trace(policy):
    """Log-probabilities are those of a replay without drafts."""
    numbers = np.random.default_rng(0)
    trace = tuple(tuple(tuple(numbers.integers(2, 5, size=n).tolist()) for n in (40, 17)) for _ in PROMPTS)
    params = SamplingParams(max_tokens=40, count=2, seed=4, temperature=0.7, replay=trace)
    plain = sampler_of(policy, False).generate(PROMPTS, params)
    sampler = sampler_of(policy, True)
    drafted = sampler.generate(PROMPTS, params)
    assert tokens(drafted) == tokens(plain) == [[list(completion) for completion in group] for group in trace]
    np.testing.assert_allclose(logprobs(drafted), logprobs(plain), atol=1e-4)
    assert sampler.drafts.sources[DraftSource.SIBLING].accepted > 5
    assert sampler.drafts.sources[DraftSource.COMPLETION].accepted > 5
    assert sampler.drafts.tokens > sampler.drafts.sequences
    rows = sum(one.sequences for one in sampler.phases.verify.values())
    assert rows == sampler.drafts.rows > sampler.drafts.sequences


def test_a_rollout_can_be_repeated_to_the_bit(policy):
    params = SamplingParams(max_tokens=60, count=4, seed=3, temperature=0.1)
    first, second = (sampler_of(policy, True).generate(PROMPTS, params) for _ in range(2))
    assert first == second


# --- decisions -------------------------------------------------------------------------------------------------------


def deciding(sequences, step_rows=None):
    """A speculation that knows a repetitive completion of each sequence."""
    prompts = [[10, 11, 12, 13] * 3 for _ in range(sequences)]
    known = speculation.Speculation(prompts, 1, frozenset(), EarlierCompletions(), step_rows)
    for index in range(sequences):
        known.know(index, [10, 11, 12])
    return known, [(index, index, 50) for index in range(sequences)]


def lengths_of(feed, sequences):
    return np.bincount(feed.rows[0], minlength=sequences).tolist()


def test_one_sequence_has_as_many_rows_as_cost_the_same():
    known, sequences = deciding(1)
    feed = known.feed(sequences)
    assert feed.rows.tolist() == [[0] * 8, list(range(8)), [0, 13, 10, 11, 12, 13, 10, 11]]


def test_more_sequences_have_fewer_rows_each_and_many_have_none():
    each = {}
    for count in (1, 4, 8, 16, 32, 127):
        known, sequences = deciding(count)
        feed = known.feed(sequences)
        each[count] = sum(feed.verified) / count if feed else 0
    assert sorted(each.values(), reverse=True) == list(each.values())
    assert each[127] < 1 < each[8] < each[1] == 7
    assert not known.tries(128)


def test_rows_that_a_step_has_anyhow_cost_nothing():
    known, sequences = deciding(16, step_rows=64)
    assert len(known.feed(sequences).rows[0]) == 64
    assert not known.tries(64)


def test_wrong_drafts_end_speculation_for_ever_longer_pauses():
    known, sequences = deciding(8)
    tried = []
    for _ in range(200):
        tried.append(known.tries(8))
        feed = known.feed(sequences) if tried[-1] else None
        if feed is None:
            assert 1 <= known.plain_steps(8) <= 8
            continue
        right = np.zeros((len(feed.rows[0]), 4), dtype=np.int32)
        right[:, 0] = feed.rows[1] == 0  # only each sequence's own row counts, and it drew another token
        known.settle(feed, right)
    assert sum(tried[:10]) > 4
    assert 0 < sum(tried[-50:]) < 5  # every 128 steps, which are 16 rounds
    counts = known.counts.sources[DraftSource.PROMPT]
    assert counts.accepted == 0 < counts.verified
