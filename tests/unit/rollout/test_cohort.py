"""Several runs on one base in one engine: each draws what it draws alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from qerl.models.policy import with_adapter, with_adapters
from qerl.models.quantize import quantize_checkpoint
from qerl.rl.noise import Noise
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import Request, SamplingParams
from qerl.settings.run import AdapterSettings, NativeSettings, NoiseSettings
from tests.tiny import tiny_family, tiny_qwen2
from tests.unit.rollout.test_engine import stop_at
from tests.unit.rollout.test_turns import STOPS, Counted

CPU = torch.device("cpu")
#: Runs that differ in all that a run may have of its own.
ADAPTERS = [
    (AdapterSettings(rank=4, alpha=8), 0),
    (AdapterSettings(rank=3, alpha=12, targets=["q_proj", "down_proj"]), 1),
    (AdapterSettings(rank=2, train_norms=False), 2),
    (AdapterSettings(rank=8, alpha=8), 3),
]
PROMPTS = [[[5, 6, 7], list(range(2, 66))], [[8]], [[9, 10, 11] * 20, [4, 3], [7]], []]


def perturbed(policy, number, noise=None):
    """The policy of a run, with trained tensors and noise that are far from the base's, and from other runs'."""
    torch.manual_seed(10 + number)
    for _, parameter in policy.trainable():
        parameter.data += 0.05 * torch.randn_like(parameter)
    Noise(policy.lm, noise or NoiseSettings(schedule="linear", sigma_start=0.1), seed=number).set(1, 4)
    policy.lm.generation_config.eos_token_id = []
    return policy


def requests():
    settings = [
        {"seed": 3, "max_tokens": 6, "count": 3},
        {"seed": 3, "max_tokens": 9, "temperature": 0.7, "count": 2},
        {"seed": 4, "max_tokens": 5, "temperature": 0.0},
        {"seed": 5, "max_tokens": 4, "top_p": 0.9},
    ]
    return [Request(prompts, SamplingParams(**each)) for prompts, each in zip(PROMPTS, settings, strict=True)]


def assert_drawn_as_alone(checkpoint, runs, requests, slots, prepare=perturbed):
    """Each run of `runs`, an adapter and a seed, draws beside the others what it draws alone, which is returned.

    `prepare` makes of the policy of a number the run's own; `requests` makes the runs' requests.
    """
    together = [prepare(policy, n) for n, policy in enumerate(with_adapters(checkpoint, runs, "float32", CPU))]
    drawn = EngineSampler(together[0], NativeSettings(), slots, together[1:]).generate_all(requests())
    for number, (adapter, seed) in enumerate(runs):
        alone, request = prepare(with_adapter(checkpoint, adapter, "float32", seed, CPU), number), requests()[number]
        expected = EngineSampler(alone, NativeSettings(), slots).generate(request.prompts, request.params)
        for group, other in zip(drawn[number], expected, strict=True):
            assert [(one.token_ids, one.replies) for one in group] == [(one.token_ids, one.replies) for one in other]
            for one, two in zip(group, other, strict=True):
                np.testing.assert_allclose(one.logprobs, two.logprobs, atol=2e-5)
    return drawn


def test_conversations_of_a_run_are_those_that_it_has_alone(tmp_path):
    """Beside a run of another environment, whose replies are slower, and one without any."""
    torch.manual_seed(0)

    def stopping(policy, number):
        stop_at(perturbed(policy, number), STOPS)
        return policy

    def asked():
        every = [replace(one, params=replace(one.params, max_tokens=60)) for one in requests()]
        turns = {0: Counted(1), 2: Counted(9)}
        return [replace(one, params=replace(one.params, turns=turns.get(n))) for n, one in enumerate(every)]

    drawn = assert_drawn_as_alone(tiny_qwen2(tmp_path / "model"), ADAPTERS, asked, 4, stopping)
    assert any(one.replies for group in drawn[2] for one in group)


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3_5", "gemma3", "phi3"])
@pytest.mark.parametrize("slots", [3, 16])
def test_each_run_draws_what_it_draws_alone(name, weights, slots, tmp_path):
    torch.manual_seed(0)
    checkpoint = tiny_qwen2(tmp_path / "model") if name == "qwen2" else tiny_family(tmp_path / "model", name=name)
    adapters = ADAPTERS if name == "qwen2" else [ADAPTERS[0], ADAPTERS[2], ADAPTERS[2], ADAPTERS[3]]
    if weights == "nvfp4":
        quantize_checkpoint(checkpoint, tmp_path / "packed", weights)
        checkpoint = tmp_path / "packed"
    assert_drawn_as_alone(checkpoint, adapters, requests, slots)
