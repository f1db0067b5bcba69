"""Training raises the reward of small models: GRPO that of each family, and of experts alone, and PPO."""

from statistics import fmean

import pytest
import torch

from qerl.models.linear import PackedLinear
from qerl.models.policy import load_policy
from qerl.rl.packing import logprobs_and_entropy, micro_batch
from qerl.rollout.engine import EngineSampler
from qerl.settings.run import NativeSettings
from tests.conftest import in_nightly
from tests.families import FAMILIES, row
from tests.unit.rl.tiny_trainer import CPU, EXPERTS, SHARP, packed_family, trainer

pytestmark = pytest.mark.usefixtures("rewarded_lower_case")
LEARNING = {
    "weights": "nvfp4",
    "steps": 40,
    "optimizer": {"learning_rate": 2e-2, "max_grad_norm": 10.0},
    "adapter": {"rank": 4},
    "rollout": {"prompts": 2, "group_size": 4, "sampling": SHARP},
}
#: It needs no groups.
PPO = {
    "loss": {"name": "ppo", "ppo": {"rank": 4, "learning_rate": 1e-2}},
    "rollout": {"prompts": 8, "group_size": 1, "sampling": SHARP},
}


def assert_rises(rewards, least=5.5):
    assert rewards[0] < 4
    assert fmean(rewards[-5:]) > least  # of 6 letters


@pytest.mark.parametrize("changes", [{"loss": {"name": "grpo"}}, PPO], ids=["grpo", "ppo"])
def test_the_reward_rises(checkpoints, tmp_path, changes):
    assert_rises([row["reward"] for row in trainer(checkpoints, tmp_path, **LEARNING | changes).run()])


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_5_moe",
        *in_nightly(*(n for n, family in FAMILIES.items() if n != "qwen3_5_moe" and row(family).refusal is None)),
    ],
)
def test_the_reward_of_each_family_rises(tmp_path, family):
    """On a packed base. With groups of 8 and this rate, runs of three seeds each ended at 5.78 or more."""
    packed = "mxfp4" if family == "gpt_oss" else "nvfp4"
    packed_family(tmp_path, family, packed)
    rollout = {"prompts": 2, "group_size": 8, "sampling": SHARP}
    optimizer = {"learning_rate": 1e-2, "max_grad_norm": 10.0}
    settings = LEARNING | {"weights": packed, "optimizer": optimizer, "rollout": rollout}
    assert_rises([row["reward"] for row in trainer(tmp_path, tmp_path / "work", **settings).run()])


@pytest.mark.parametrize("engine", [True, *in_nightly(False)])
def test_the_reward_rises_by_the_experts_alone(mixture, tmp_path, engine):
    """The base stays as it is, bit for bit, and the stored adapter is the policy."""
    run = trainer(mixture, tmp_path, **LEARNING | {"adapter": EXPERTS})
    if engine:
        run.collector.sampler = EngineSampler(run.policy, NativeSettings())
    assert all(".experts.lora_" in name for name, _ in run.policy.trainable())
    layers = [layer for layer in run.policy.lm.modules() if isinstance(layer, PackedLinear)]
    before = [buffer.clone() for layer in layers for buffer in layer.buffers()]
    rows = run.run()
    assert_rises([row["reward"] for row in rows], least=5)
    assert max(row["mismatch/kl"] for row in rows) < 1e-6
    after = [buffer for layer in layers for buffer in layer.buffers()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    run.policy.save(tmp_path / "adapter")
    stored = load_policy(mixture / "nvfp4", tmp_path / "adapter", "float32", CPU)
    ids = torch.arange(5, 30)[None]
    with torch.no_grad():
        assert torch.equal(stored.lm(ids).logits, run.policy.lm(ids).logits)


def test_in_16_bits_products_are_those_of_the_autocast(mixture, tmp_path):
    """A and B stay float32, with float32 gradients, while passes round them as they do activations."""
    same = LEARNING | {"adapter": EXPERTS}
    runs = [trainer(mixture, tmp_path, **same, dtype=dtype) for dtype in ("bfloat16", "float32")]
    [sample] = runs[0].collector.collect(1, 0).samples[:1]
    gradients = []
    for run in runs:
        for name, parameter in run.policy.trainable():
            torch.manual_seed(len(name))
            parameter.data.normal_(std=0.05)
        logprobs, _ = logprobs_and_entropy(run.policy, micro_batch([sample], [0], CPU), 1.0)
        logprobs.sum().backward()
        gradients.append([parameter.grad for _, parameter in run.policy.trainable()])
    for rough, fine in zip(*gradients, strict=True):
        assert rough.dtype == torch.float32
        assert (rough - fine).norm() < 0.1 * fine.norm()
