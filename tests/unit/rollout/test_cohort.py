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


def perturbed(policy, number):
    """The policy of a run, with trained tensors and noise that are far from the base's, and from other runs'."""
    torch.manual_seed(10 + number)
    for _, parameter in policy.trainable():
        parameter.data += 0.05 * torch.randn_like(parameter)
    Noise(policy.lm, NoiseSettings(schedule="linear", sigma_start=0.1), seed=number).set(1, 4)
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


def test_conversations_of_a_run_are_those_that_it_has_alone(tmp_path):
    """Beside a run of another environment, whose replies are slower, and one without any."""
    torch.manual_seed(0)
    checkpoint = tiny_qwen2(tmp_path / "model")
    together = [perturbed(policy, n) for n, policy in enumerate(with_adapters(checkpoint, ADAPTERS, "float32", CPU))]

    def asked():
        every = [replace(one, params=replace(one.params, max_tokens=60)) for one in requests()]
        turns = {0: Counted(1), 2: Counted(9)}
        return [replace(one, params=replace(one.params, turns=turns.get(n))) for n, one in enumerate(every)]

    stop_at(together[0], STOPS)
    drawn = EngineSampler(together[0], NativeSettings(), 4, together[1:]).generate_all(asked())
    assert any(one.replies for group in drawn[2] for one in group)
    for number, (adapter, seed) in enumerate(ADAPTERS):
        alone = perturbed(with_adapter(checkpoint, adapter, "float32", seed, CPU), number)
        stop_at(alone, STOPS)
        request = asked()[number]
        expected = EngineSampler(alone, NativeSettings(), 4).generate(request.prompts, request.params)
        for group, other in zip(drawn[number], expected, strict=True):
            assert [(one.token_ids, one.replies) for one in group] == [(one.token_ids, one.replies) for one in other]


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
    together = with_adapters(checkpoint, adapters, "float32", CPU)
    together = [perturbed(policy, number) for number, policy in enumerate(together)]
    drawn = EngineSampler(together[0], NativeSettings(), slots, together[1:]).generate_all(requests())
    for number, (adapter, seed) in enumerate(adapters):
        alone = perturbed(with_adapter(checkpoint, adapter, "float32", seed, CPU), number)
        request = requests()[number]
        expected = EngineSampler(alone, NativeSettings(), slots).generate(request.prompts, request.params)
        for group, other in zip(drawn[number], expected, strict=True):
            assert [one.token_ids for one in group] == [one.token_ids for one in other]
            for one, two in zip(group, other, strict=True):
                np.testing.assert_allclose(one.logprobs, two.logprobs, atol=2e-5)
