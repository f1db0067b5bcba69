"""Verified drafts on a CPU, where the same code runs without graphs: completions are those of plain steps."""

import numpy as np
import pytest
import torch

from qerl.kernels.state import DraftSource
from qerl.models.policy import with_adapter
from qerl.rl.noise import Noise
from qerl.rollout import scheduler, speculation
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.run import AdapterSettings, NativeSettings, NoiseSettings
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
    monkeypatch.setattr(speculation, "_WORTHWHILE", 1)
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
    if params.max_tokens > 1:
        earlier = sampler.drafts.sources[DraftSource.EARLIER]
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
    padded = sum(one.sequences for one in sampler.phases.verify.values())
    assert padded >= sampler.drafts.rows > sampler.drafts.sequences
    assert sampler.drafts.steps == sum(one.steps for one in sampler.phases.verify.values())


def test_a_rollout_can_be_repeated_to_the_bit(policy):
    params = SamplingParams(max_tokens=60, count=4, seed=3, temperature=0.1)
    first, second = (sampler_of(policy, True).generate(PROMPTS, params) for _ in range(2))
    assert first == second


def test_no_step_waits_for_a_look_at_the_one_before(policy, monkeypatch):
    """A look is read when the next step has been launched."""
    order: list[str] = []
    params = SamplingParams(max_tokens=60, count=2, seed=4)
    sampler = with_guesses(policy, sampler_of(policy, False).generate(PROMPTS, params))
    for name in ("_advance", "_see"):
        method = getattr(scheduler.Scheduler, name)
        monkeypatch.setattr(scheduler.Scheduler, name, lambda *a, n=name, m=method: (order.append(n), m(*a))[1])
    sampler.generate(PROMPTS, params)
    assert sampler.drafts.steps > 10
    assert order == ["_advance", *["_advance", "_see"] * (len(order) // 2)]


# --- decisions -------------------------------------------------------------------------------------------------------


def rows_for(sequences, right_each, step_rows=None):
    """The rows of a step for sequences of which each is expected to have so many right tokens in any step."""
    speculation_ = speculation.Speculation(step_rows)
    sizes = speculation.step_sizes(step_rows)
    speculation_.learn(1, [min(right_each * sequences, max(size - sequences, 0)) for size in sizes])
    return speculation_.rows(sequences)


def test_rows_are_as_many_as_pay():
    assert speculation.step_sizes(None) == [8, 16, 32, 64, 96, 128]
    assert rows_for(1, 4) == 8
    assert rows_for(1, 0) == rows_for(16, 0.02) == 0
    assert rows_for(8, 0.9) == 16
    assert rows_for(8, 2.9) == 32
    each = [rows_for(count, 2) / count for count in (1, 4, 8, 16, 32, 64)]
    assert sorted(each, reverse=True) == each
    assert rows_for(128, 7) == 0


def test_rows_that_a_step_has_anyhow_cost_nothing():
    assert speculation.step_sizes(64) == [64]
    assert rows_for(16, 1.0, step_rows=64) == 64
    assert rows_for(64, 7, step_rows=64) == 0


def test_searches_without_gain_become_rare():
    """After 2, 4, 8 … 128 steps, each a step of its own while drafts may pay."""
    known, searches, searched = speculation.Speculation(None), 0, []
    for step in range(600):
        if known.rows(4):
            raise AssertionError(step)
        assert known.plain_steps(4, 8) == 1
        if known.tries(4):
            searched.append(step)
            searches += 1
            known.learn(searches, [0.01 * searches] * len(speculation.step_sizes(None)))
    assert len(searched) == 10
    assert max(np.diff(searched)) == 128 == max(np.diff(searched)[-3:])
    assert known.plain_steps(128, 8) == 8


def test_a_search_that_finds_much_ends_the_pauses():
    known = speculation.Speculation(None)
    known.learn(1, [0.0] * len(speculation.step_sizes(None)))
    assert known.rows(1) == 0
    steps = 0
    while not known.tries(1):
        steps += known.plain_steps(1, 8)
    assert steps == 2
    assert known.rows(1) == 0  # nothing is known yet
    known.learn(2, [5.0] * len(speculation.step_sizes(None)))
    assert known.rows(1) == 8
