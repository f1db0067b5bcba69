"""The states of delta nets in the engine: in slots that sequences share by turns, and for groups that wait."""

from dataclasses import replace

import pytest
import torch

from qerl.formats.codecs import PACKED_FORMATS
from qerl.models.policy import with_adapter
from qerl.models.quantize import quantize_checkpoint
from qerl.rollout.engine import EngineSampler, Scheduler, slots_for
from qerl.rollout.sampler import SamplingParams
from qerl.settings.run import AdapterSettings, NativeSettings
from tests.tiny import tiny_family

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [8], list(range(2, 66)), [9, 10, 11, 12, 13]]
PARAMS = SamplingParams(max_tokens=24, count=4, seed=3, ignore_eos=True)
#: Bytes of a page, and of a sequence's states: one block of attention and one of a delta net, in float32.
PAGE, STATE = 2 * 2 * 64 * 16 * 4, 4 * (4 * 8 * 16 + 3 * 96)


def perturbed(folder):
    policy = with_adapter(folder, AdapterSettings(rank=4), "float32", seed=0, device=CPU)
    torch.manual_seed(1)
    for _, parameter in policy.trainable():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return policy


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_family(tmp_path_factory.mktemp("hybrid"), "qwen3_5")


@pytest.fixture(scope="module")
def policy(base):
    return perturbed(base)


@pytest.fixture(scope="module")
def whole(policy):
    """Completions that all have a slot and pages of their own from the start."""
    return EngineSampler(policy, NativeSettings(), 16).generate(PROMPTS, PARAMS)


def assert_same(groups, expected):
    for group, other in zip(groups, expected, strict=True):
        assert [one.token_ids for one in group] == [one.token_ids for one in other]
        for one, known in zip(group, other, strict=True):
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(known.logprobs), atol=5e-5, rtol=0)


@pytest.mark.parametrize("settings", [{}, {"batch_invariant": True}])
def test_groups_that_enter_by_turns_start_from_their_prompts_state(policy, whole, settings):
    """Three slots for groups of four: each group is entered in parts, beside the rest of the one before."""
    assert_same(EngineSampler(policy, NativeSettings(**settings), 3).generate(PROMPTS, PARAMS), whole)


def test_interrupted_sequences_continue_from_the_state_of_their_tokens(policy, monkeypatch):
    interrupted, interrupt = [], Scheduler._interrupt

    def noted(self, sequence):
        interrupted.append(sequence.index)
        interrupt(self, sequence)

    monkeypatch.setattr(Scheduler, "_interrupt", noted)
    params = replace(PARAMS, max_tokens=100, count=2)
    expected = EngineSampler(policy, NativeSettings(), 8).generate(PROMPTS, params)
    assert not interrupted
    # All slots, though the cache can't hold their texts of up to three pages.
    monkeypatch.setattr("qerl.rollout.engine.slots_for", lambda room, sequences, *_: sequences)
    sampler = EngineSampler(policy, NativeSettings(kv_cache_gib=(10 * STATE + 7.5 * PAGE) / 2**30), 8)
    assert_same(sampler.generate(PROMPTS, params), expected)
    assert interrupted


def test_states_take_their_part_of_the_memory(policy, whole):
    """Each slot has pages for the longest sequence, of two pages, so that no sequence waits for pages."""
    room = 5 * STATE + (3 * 3 + 4) * PAGE
    sampler = EngineSampler(policy, NativeSettings(kv_cache_gib=(room + PAGE) / 2**30), 16)
    assert_same(sampler.generate(PROMPTS, PARAMS), whole)
    assert sampler._pool.state.count == 3
    assert room <= sampler.cache_bytes <= room + PAGE
    assert sampler.cache_wanted_bytes == 18 * STATE + (16 * 3 + 4) * PAGE
    pool = sampler._pool
    sampler.generate(PROMPTS, PARAMS)
    assert sampler._pool is pool
    assert (slots_for(0, 9, 4, PAGE, STATE), slots_for(0, 9, 4, PAGE, 0)) == (1, 9)


@pytest.mark.parametrize("weights", PACKED_FORMATS)
def test_layers_of_a_delta_net_that_are_packed_are_served(base, tmp_path, weights):
    quantize_checkpoint(base, tmp_path, weights, pack_delta_nets=True)
    packed = perturbed(tmp_path)
    groups = EngineSampler(packed, NativeSettings(), 8).generate(PROMPTS, PARAMS)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            ids = torch.tensor([prompt + completion.token_ids])
            with torch.no_grad():
                expected = torch.log_softmax(packed.lm(ids).logits[0, len(prompt) - 1 : -1], -1)
            expected = expected.gather(-1, ids[0, len(prompt) :, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-3, rtol=0)
