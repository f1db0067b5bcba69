"""The native engine, which runs on a CPU without graphs, and the eager sampler against Hugging Face's passes."""

import gc
import weakref
from copy import deepcopy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from qerl.host.gpus import seconds
from qerl.kernels.state import FP8, page_bytes
from qerl.models.policy import load_policy, trained_in_full, weight_bytes, with_adapter
from qerl.rl.noise import Noise
from qerl.rollout import engine
from qerl.rollout.eager import EagerSampler
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import BatchPart, SamplingParams
from qerl.settings.base import ConfigError
from qerl.settings.run import AdapterSettings, NativeSettings, NoiseSettings
from tests.conftest import in_nightly
from tests.parity.family_models import adapted, assert_drawn_by, perturbed
from tests.tiny import tiny_family, tiny_gpt_oss, tiny_llama, tiny_qwen2, tiny_qwen3

#: One, less than one, exactly one, and more than one page of the cache.
PROMPTS = [[5, 6, 7], [8], list(range(2, 66)), [9, 10, 11, 12, 13, 14, 15] * 20]
CPU = torch.device("cpu")
MODELS = {"qwen2": tiny_qwen2, "qwen3": tiny_qwen3, "llama": tiny_llama}
MODELS |= {
    name: partial(tiny_family, name=name)
    for name in ("mistral", "mistral-sliding", "phi3", "gemma3", "qwen3_5", "qwen3_5_moe")
}
MODELS["gpt_oss"] = tiny_gpt_oss


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    # Norms and biases are drawn from the global generator.
    torch.manual_seed(0)
    return {name: write(tmp_path_factory.mktemp(name)) for name, write in MODELS.items()}


#: Those without a mechanism of their own: `tests/parity/test_families.py` has the engine's draws of each.
LIKE_OTHERS = ("qwen3", "llama", "mistral", "mistral-sliding", "qwen3_5")


@pytest.fixture(scope="module", params=[*(n for n in MODELS if n not in LIKE_OTHERS), *in_nightly(*LIKE_OTHERS)])
def any_policy(request, checkpoints):
    """A policy of each architecture whose adapter and norms have an effect."""
    return adapted(checkpoints[request.param])


@pytest.fixture(scope="module")
def policy(checkpoints):
    return adapted(checkpoints["qwen2"])


@pytest.fixture(scope="module")
def hybrid(checkpoints):
    """A policy with a block of attention and one of a delta net."""
    return adapted(checkpoints["qwen3_5"])


def stop_at(policy, tokens):
    policy.lm.generation_config.eos_token_id = list(tokens)


def sampler_of(policy, max_sequences=8, pages=None, **settings):
    """A sampler with a cache of `pages` pages; the policy has no stop tokens from then on."""
    stop_at(policy, [])
    if pages is not None:
        config, dtype = policy.lm.config, FP8 if settings.get("kv_cache_dtype") == "fp8" else torch.float32
        page = page_bytes(config.num_key_value_heads, policy.lm.model.layers[0].self_attn.head_dim, dtype)
        settings["kv_cache_gib"] = (pages + 0.5) * config.num_hidden_layers * page / 2**30
    return EngineSampler(policy, NativeSettings(**settings), max_sequences)


def eager_of(policy, max_sequences=8):
    stop_at(policy, [])
    return EagerSampler(policy, max_sequences)


both = pytest.mark.parametrize("make", [sampler_of, eager_of])
#: With room for all, for some at a time, and in the engine for pages of some.
places = pytest.mark.parametrize(
    ("make", "room"),
    [(sampler_of, (8,)), (sampler_of, (3,)), (sampler_of, (8, 12)), (eager_of, (8,)), (eager_of, (4,))],
)


def assert_exact(lm, prompts, groups, temperature=1.0):
    assert_drawn_by(lm, groups, 1e-4, prompts, temperature)


def in_float64(lm):
    """A copy, since two that compute in float32 differ by the errors of both; routers are float32 alone."""
    return lm if hasattr(lm.config, "num_experts_per_tok") else deepcopy(lm).double()


def tokens(groups):
    return [[completion.token_ids for completion in group] for group in groups]


@both
@pytest.mark.parametrize(("sigma", "temperature"), [(0.1, 0.7), *in_nightly((0.0, 1.0))])
def test_logprobs_are_those_of_the_policy_with_its_noise(any_policy, make, sigma, temperature):
    sampler = make(any_policy)
    params = SamplingParams(max_tokens=70, temperature=temperature, count=3, seed=4)
    with Noise(any_policy.lm, NoiseSettings(schedule="constant", sigma_start=sigma), seed=0).at(1, 10):
        groups = sampler.generate(PROMPTS, params)
        assert [[len(c.token_ids) for c in group] for group in groups] == [[70] * 3] * 4
        assert_exact(in_float64(any_policy.lm), PROMPTS, groups, temperature)


def test_a_policy_trained_in_full_is_sampled_as_it_is_now(checkpoints):
    full = trained_in_full(checkpoints["qwen3"], "float32", CPU)
    sampler = sampler_of(full)
    before = sampler.generate(PROMPTS, SamplingParams(max_tokens=6))
    with torch.no_grad():
        for parameter in full.lm.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    after = sampler.generate(PROMPTS, SamplingParams(max_tokens=6))
    assert_exact(full.lm, PROMPTS, after)
    assert after[0][0].logprobs != before[0][0].logprobs


@both
def test_greedy_equals_generate_of_transformers(any_policy, make):
    groups = make(any_policy).generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0))
    for prompt, (completion,) in zip(PROMPTS, groups, strict=True):
        ids = torch.tensor([prompt])
        expected = any_policy.lm.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert completion.token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("make", "settings", "name"),
    [
        (sampler_of, {"max_sequences": 3}, "policy"),
        (sampler_of, {"max_sequences": 5, "batch_invariant": True}, "policy"),
        (eager_of, {"max_sequences": 4}, "policy"),
        # Three slots for groups of four: each enters in parts, beside the rest of the one before, from its own state.
        (sampler_of, {"max_sequences": 3}, "hybrid"),
        (sampler_of, {"max_sequences": 3, "batch_invariant": True}, "hybrid"),
    ],
)
def test_completions_depend_on_seed_and_place_alone_not_on_the_batch(request, make, settings, name):
    policy = request.getfixturevalue(name)
    params = SamplingParams(max_tokens=40, count=4, seed=3)
    whole = tokens(make(policy, 16).generate(PROMPTS, params))
    assert tokens(make(policy, **settings).generate(PROMPTS, params)) == whole
    for own, waiting in (([2], [0, 3]), ([], [1])):
        drawn = {*own, *waiting} if own else set()
        part = BatchPart(own, lambda most, left=list(waiting): [left.pop(0)] if left else [])
        groups = tokens(make(policy, **settings).generate(PROMPTS, replace(params, part=part)))
        assert groups == [group if number in drawn else [] for number, group in enumerate(whole)]
    other = tokens(make(policy).generate(PROMPTS, SamplingParams(max_tokens=40, count=4, seed=5)))
    assert other[0] != whole[0]
    assert len({tuple(row) for row in whole[0]}) > 1


@both
def test_a_stop_token_ends_a_completion_and_is_part_of_it(policy, make):
    sampler, params = make(policy, max_sequences=3), SamplingParams(max_tokens=40, count=4, seed=2)
    endless = sampler.generate(PROMPTS, params)
    stop = endless[0][0].token_ids[20]
    stop_at(policy, [stop, 10_000])
    for before, after in zip(endless, sampler.generate(PROMPTS, params), strict=True):
        for long, short in zip(before, after, strict=True):
            end = long.token_ids.index(stop) + 1 if stop in long.token_ids else 40
            assert short.token_ids == long.token_ids[:end]
            assert short.finished == (stop in long.token_ids)
            np.testing.assert_allclose(short.logprobs, long.logprobs[:end], atol=1e-4)
    assert sampler.generate(PROMPTS, replace(params, ignore_eos=True)) == endless


@pytest.fixture
def interrupted(monkeypatch):
    """The sequences that are taken off their slots."""
    seen, interrupt = [], engine.Scheduler._interrupt
    monkeypatch.setattr(engine.Scheduler, "_interrupt", lambda self, s: (seen.append(s.index), interrupt(self, s)))
    return seen


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_sequences_make_way_for_others_where_the_cache_is_short(policy, interrupted, dtype):
    """10 pages can't hold 8 sequences of up to 4: some are taken off and go on later, with the same tokens."""
    params = SamplingParams(max_tokens=100, count=2, seed=3)
    plenty = sampler_of(policy, kv_cache_dtype=dtype).generate(PROMPTS, params)
    assert not interrupted
    short = sampler_of(policy, pages=10, kv_cache_dtype=dtype).generate(PROMPTS, params)
    assert interrupted
    assert tokens(short) == tokens(plenty)


def test_a_sequence_that_its_first_token_ends_makes_way_for_others_as_it_is(policy):
    """It had not been looked at yet, was taken off its slot, and went on behind its end."""
    params = SamplingParams(max_tokens=40, count=2, seed=3, lengths=((40, 1),) * 4)
    groups = sampler_of(policy, pages=9).generate([PROMPTS[2]] * 4, params)
    assert tuple(tuple(map(len, group)) for group in tokens(groups)) == params.lengths


def test_the_smallest_cache_serves_one_sequence_after_the_other(policy):
    params = SamplingParams(max_tokens=60, count=3, seed=3)
    assert tokens(sampler_of(policy, pages=6).generate(PROMPTS, params)) == tokens(
        sampler_of(policy).generate(PROMPTS, params)
    )


def test_a_sequence_that_the_cache_cannot_hold_is_one_sentence(policy):
    with pytest.raises(ConfigError, match=r"lower max_tokens or raise native\.kv_cache_gib"):
        sampler_of(policy, pages=5).generate(PROMPTS, SamplingParams(max_tokens=60))


def test_memory_that_cannot_hold_a_sequence_is_out_of_memory(policy, monkeypatch):
    monkeypatch.setattr(EngineSampler, "_cache_bytes", lambda self: 0)
    with pytest.raises(torch.OutOfMemoryError, match="the rollout ran out of GPU memory; lower max_tokens"):
        sampler_of(policy).generate(PROMPTS, SamplingParams(max_tokens=60))


def test_a_thousand_requests_of_mixed_lengths_leak_no_page(policy):
    numbers = np.random.default_rng(0)
    lengths = numbers.integers(1, 150, size=250)
    prompts = [numbers.integers(2, 100, size=length).tolist() for length in lengths]
    sampler = sampler_of(policy, max_sequences=64, pages=100)
    stop_at(policy, range(2, 12))
    groups = sampler.generate(prompts, SamplingParams(max_tokens=40, count=4, seed=1))
    assert {len(c.token_ids) for group in groups for c in group} >= set(range(1, 20))
    assert all(c.finished == (c.token_ids[-1] in range(2, 12)) for group in groups for c in group)
    pages = sampler._pool.pages
    assert sorted(pages.take(pages.available)) == list(range(1, pages.count))


def test_changed_adapters_and_noise_reach_the_next_call(checkpoints):
    changing = with_adapter(checkpoints["qwen2"], AdapterSettings(rank=4), "float32", seed=0, device=CPU)
    sampler, params = sampler_of(changing), SamplingParams(max_tokens=8, count=2, seed=1)
    clean = sampler.generate(PROMPTS, params)
    perturbed(changing)
    changed = sampler.generate(PROMPTS, params)
    assert_exact(changing.lm, PROMPTS, changed)
    assert changed[0][0].logprobs != clean[0][0].logprobs
    with Noise(changing.lm, NoiseSettings(schedule="constant", sigma_start=0.1), seed=0).at(1, 10):
        assert sampler.generate(PROMPTS, params)[0][0].logprobs != changed[0][0].logprobs
    assert sampler.generate(PROMPTS, params) == changed


@pytest.mark.parametrize("sleep", [False, True])
def test_longer_rollouts_follow_shorter_ones(policy, sleep):
    sampler = sampler_of(policy, sleep=sleep)
    for prompts, max_tokens in ((PROMPTS[:1], 3), (PROMPTS, 70), (PROMPTS[:2], 5)):
        groups = sampler.generate(prompts, SamplingParams(max_tokens=max_tokens, count=2))
        assert_exact(policy.lm, prompts, groups)
    assert (sampler._pool is None) == sleep


def test_a_cache_that_memory_bounds_is_given_back_after_the_rollout(policy, monkeypatch):
    """An update would find nothing left; a size that was asked for is kept."""
    params = SamplingParams(max_tokens=70, count=2)
    needed = sampler_of(policy)
    expected = needed.generate(PROMPTS, params)
    assert not needed.released
    size = needed.cache_bytes
    monkeypatch.setattr(EngineSampler, "_cache_bytes", lambda self: size // 2)
    short = sampler_of(policy)
    assert short.generate(PROMPTS, params) == expected
    assert short.released
    assert 0 < short.cache_bytes <= size // 2
    asked_for = sampler_of(policy, kv_cache_gib=1.0)
    asked_for.generate(PROMPTS, params)
    assert asked_for._bounded
    assert not asked_for.released


def test_cache_and_weights_are_free_as_soon_as_nothing_uses_them(policy):
    """A reference cycle kept a sharded policy's copy, 27 GiB of 14B, through the update after a rollout."""
    sampler = sampler_of(policy)
    sampler.generate(PROMPTS, SamplingParams(max_tokens=5, count=2))
    assert sampler._pool is not None
    gc.collect()
    gc.disable()  # which would free them some time later
    try:
        cache, weights = weakref.ref(sampler._pool), weakref.ref(sampler._decoder)
        sampler.release()
        assert cache() is None
        del sampler
        assert weights() is None
    finally:
        gc.enable()


def test_a_cache_that_is_too_small_is_free_before_the_next_one_is_sized(policy, monkeypatch):
    """Both were in memory at once, so that four runs of 32B with a cache of 30 GiB had no room in 80 GB."""
    sampler = sampler_of(policy)
    sampler.generate(PROMPTS[:1], SamplingParams(max_tokens=5))
    cache, left, size = weakref.ref(sampler._pool), [], EngineSampler._cache_bytes
    monkeypatch.setattr(EngineSampler, "_cache_bytes", lambda self: left.append(cache()) or size(self))
    gc.collect()
    gc.disable()
    try:
        sampler.generate(PROMPTS, SamplingParams(max_tokens=70))
    finally:
        gc.enable()
    assert left == [None]


def test_an_interrupted_rollout_leaves_a_working_sampler(policy, monkeypatch):
    sampler, params = sampler_of(policy), SamplingParams(max_tokens=20, seed=1)
    expected = sampler.generate(PROMPTS, params)
    cache = weakref.ref(sampler._pool)

    def fails(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.Scheduler, "_collect", fails)
        with pytest.raises(KeyboardInterrupt) as kept:
            sampler.generate(PROMPTS, params)
    assert cache() is None, kept
    assert sampler.generate(PROMPTS, params) == expected


def test_moved_weights_are_an_error(checkpoints):
    moved = load_policy(checkpoints["llama"], None, "float32", CPU)
    sampler = sampler_of(moved)
    moved.lm.bfloat16()
    with pytest.raises(RuntimeError, match="make a new sampler"):
        sampler.sync()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "supports qwen2, .*, not 'gpt2'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "no dynamic rotary positions"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "no dynamic rotary positions"),
        ({"hidden_act": "gelu"}, "supports silu and gelu_pytorch_tanh as the activation, not 'gelu'"),
    ],
)
def test_what_the_engine_does_not_know_is_one_sentence(checkpoints, changes, message):
    unknown = load_policy(checkpoints["qwen2"], None, "float32", CPU)
    for key, value in changes.items():
        setattr(unknown.lm.config, key, value)
    with pytest.raises(ConfigError, match=message):
        EngineSampler(unknown, NativeSettings())


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"modules_to_save": ["embed_tokens"]}, None),
        ({"target_modules": ["q_proj", "lm_head"]}, None),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "doesn't support LoRA of the embedding; merge the adapter"),
        ({"modules_to_save": ["lm_head"]}, "doesn't support layers of ModulesToSaveWrapper"),
        ({"trainable_token_indices": [5, 6]}, "doesn't support layers of TrainableTokensWrapper"),
    ],
)
def test_an_adapter_of_pefts_with_a_changed_embedding_or_head_is_sampled_right_or_refused(
    checkpoints, tmp_path, options, refusal
):
    model = AutoModelForCausalLM.from_pretrained(checkpoints["qwen2"], dtype=torch.float32)
    theirs = get_peft_model(model, LoraConfig(r=2, **{"target_modules": ["q_proj"], **options}))
    torch.manual_seed(1)
    for parameter in theirs.parameters():
        parameter.data = parameter + 0.05 * torch.randn(parameter.shape) * parameter.requires_grad
    theirs.save_pretrained(tmp_path, save_embedding_layers=False)
    policy = load_policy(checkpoints["qwen2"], tmp_path, "float32", CPU)
    if refusal:
        with pytest.raises(ConfigError, match=refusal):
            sampler_of(policy)
        return
    assert_exact(policy.lm, PROMPTS, sampler_of(policy).generate(PROMPTS, SamplingParams(max_tokens=5, count=2)))


def test_a_sequence_at_which_rotary_positions_change_is_one_sentence(checkpoints):
    """Phi-4-mini has other frequencies beyond its original length, here 256 tokens; the longest prompt has 140."""
    sampler = sampler_of(load_policy(checkpoints["phi3"], None, "float32", CPU))
    with pytest.raises(ConfigError, match=r"a sequence may have 257 tokens.* after 256; lower max_tokens to 116"):
        sampler.generate(PROMPTS, SamplingParams(max_tokens=117))
    with pytest.raises(ConfigError, match=r"257 tokens.* after 256; leave out prompts of 256 or more tokens"):
        sampler.generate([[5] * 256], SamplingParams(max_tokens=1))
    groups = sampler.generate(PROMPTS, SamplingParams(max_tokens=116))
    assert_exact(sampler.policy.lm, PROMPTS, groups)


@both
def test_an_empty_prompt_is_an_error(policy, make):
    with pytest.raises(ValueError, match="has no tokens"):
        make(policy).generate([[1], []], SamplingParams(max_tokens=2))
    assert make(policy).generate([], SamplingParams(max_tokens=2)) == []


# --- lengths and phases ----------------------------------------------------------------------------------------------

LENGTHS = ((3, 20), (70, 1), (9, 70), (33, 12))


@places
def test_completions_end_at_their_lengths(policy, make, room):
    """Each is the beginning of the completion without a length, wherever it was decoded or interrupted."""
    params = SamplingParams(max_tokens=70, count=2, seed=4)
    whole = make(policy, room[0]).generate(PROMPTS, params)
    cut = make(policy, *room).generate(PROMPTS, replace(params, lengths=LENGTHS))
    for group, cut_group, lengths in zip(whole, cut, LENGTHS, strict=True):
        assert [c.token_ids for c in cut_group] == [c.token_ids[:n] for c, n in zip(group, lengths, strict=True)]


@pytest.mark.parametrize(("gigabytes", "steps"), [(0.05, 8), (1.2, 8), (2.2, 5), (5.9, 2), (9.9, 2), (65.0, 1)])
def test_larger_policies_are_looked_at_after_fewer_steps(gigabytes, steps):
    assert engine.steps_between_looks(int(gigabytes * 1e9)) == steps


@pytest.mark.parametrize("every", [1, 3, engine.MOST_STEPS])
def test_phases_count_the_steps_of_a_rollout(policy, every, monkeypatch):
    monkeypatch.setattr(engine, "_LOOK_BYTES", every * weight_bytes(policy))
    sampler = sampler_of(policy, max_sequences=3)
    with seconds() as elapsed:
        sampler.generate(PROMPTS, SamplingParams(max_tokens=70, count=2, seed=4, lengths=LENGTHS))
    phases = sampler.phases
    assert max(phases.decode) == 4  # three sequences in a batch of four
    assert phases.prefills > 1
    # A sequence's first token is drawn behind its prompt, and it may stay for up to two looks after its end.
    drawn = sum(map(sum, LENGTHS)) - 8
    steps = sum(decode.sequences for decode in phases.decode.values())
    assert drawn <= steps <= drawn + 8 * 2 * every
    timed = phases.prefill + phases.between + sum(decode.seconds for decode in phases.decode.values())
    assert 0 < phases.prefill < timed <= elapsed.value


@places
def test_replayed_completions_are_the_trace(policy, make, room):
    """Tokens are those of the trace, and log-probabilities the policy's own of these."""
    numbers = np.random.default_rng(3)
    vocabulary = policy.lm.config.vocab_size
    trace = tuple(tuple(tuple(numbers.integers(vocabulary, size=n).tolist()) for n in group) for group in LENGTHS)
    params = SamplingParams(max_tokens=70, count=2, seed=4, temperature=0.7, replay=trace)
    groups = make(policy, *room).generate(PROMPTS, params)
    assert tokens(groups) == [[list(completion) for completion in group] for group in trace]
    assert_exact(policy.lm, PROMPTS, groups, temperature=0.7)
    free = make(policy).generate(PROMPTS, replace(params, replay=None, lengths=LENGTHS))
    assert tokens(free) != tokens(groups)
    again = make(policy).generate(PROMPTS, replace(params, replay=as_trace(free)))
    assert tokens(again) == tokens(free)
    np.testing.assert_allclose(again[2][1].logprobs, free[2][1].logprobs, atol=1e-5)


def as_trace(groups):
    return tuple(tuple(tuple(completion.token_ids) for completion in group) for group in groups)


# --- states of delta nets --------------------------------------------------------------------------------------------

#: Bytes of a page, and of a sequence's states: one block of attention and one of a delta net, in float32.
HYBRID_PAGE, STATE = 2 * 2 * 64 * 16 * 4, 4 * (4 * 8 * 16 + 3 * 96)
SHORT = [PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[3][:5]]


def test_interrupted_sequences_continue_from_the_state_of_their_tokens(hybrid, interrupted, monkeypatch):
    params = SamplingParams(max_tokens=100, count=2, seed=3)
    expected = tokens(sampler_of(hybrid).generate(SHORT, params))
    assert not interrupted
    # All slots, though the cache can't hold their texts of up to three pages.
    monkeypatch.setattr(engine, "slots_for", lambda room, sequences, *_: sequences)
    sampler = sampler_of(hybrid, kv_cache_gib=(10 * STATE + 7.5 * HYBRID_PAGE) / 2**30)
    assert tokens(sampler.generate(SHORT, params)) == expected
    assert interrupted


def test_states_take_their_part_of_the_memory(hybrid):
    """Each slot has pages for the longest sequence, of two pages, so that no sequence waits for pages."""
    params = SamplingParams(max_tokens=24, count=4, seed=3)
    room = 5 * STATE + (3 * 3 + 4) * HYBRID_PAGE
    sampler = sampler_of(hybrid, 16, kv_cache_gib=(room + HYBRID_PAGE) / 2**30)
    assert tokens(sampler.generate(SHORT, params)) == tokens(sampler_of(hybrid, 16).generate(SHORT, params))
    pool = sampler._pool
    assert pool.state.count == 3
    assert room <= sampler.cache_bytes <= room + HYBRID_PAGE
    assert sampler.cache_wanted_bytes == 18 * STATE + (16 * 3 + 4) * HYBRID_PAGE
    sampler.generate(SHORT, params)
    assert sampler._pool is pool
    assert [engine.slots_for(0, 9, 4, HYBRID_PAGE, state) for state in (STATE, 0)] == [1, 9]
