"""GRPO runs whose adapters are those of a mixture's experts, on packed weights."""

from statistics import fmean

import pytest
import torch

from qerl.models.linear import PackedLinear
from qerl.models.policy import load_policy
from qerl.models.quantize import quantize_checkpoint
from qerl.rl.packing import logprobs_and_entropy, micro_batch
from qerl.rl.rollouts import Collector, Task
from qerl.rollout.engine import EngineSampler
from qerl.settings.run import NativeSettings
from tests.conftest import in_nightly
from tests.tiny import tiny_family, tiny_gpt_oss, write_template
from tests.unit.rl.tiny_trainer import PROBLEMS, SHARP, kill_at, trainer, untimed, weights

EXPERTS = ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]
ALONE = {"rank": 4, "dropout": 0.0, "targets": EXPERTS, "train_norms": False}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    write_template(tiny_family(folder / "bf16", "qwen3_moe", dtype=torch.bfloat16))
    quantize_checkpoint(folder / "bf16", folder / "nvfp4", "nvfp4")
    write_template(folder / "nvfp4")
    write_template(tiny_gpt_oss(folder / "mxfp4"))
    return folder


pytestmark = pytest.mark.usefixtures("rewarded_lower_case")


def learning(mixture, work, **changes):
    """A run in which experts alone have adapters, and nothing else is trained."""
    optimizer = {"learning_rate": 2e-2, "max_grad_norm": 10.0}
    rollout = {"prompts": 2, "group_size": 4, "sampling": SHARP}
    settings = {"weights": "nvfp4", "optimizer": optimizer, "adapter": ALONE, "rollout": rollout}
    return trainer(mixture, work, **{**settings, **changes})


@pytest.mark.parametrize("engine", [True, *in_nightly(False)])
def test_the_reward_rises_by_the_experts_alone(mixture, tmp_path, engine):
    """The base stays as it is, bit for bit, and the stored adapter is the policy."""
    run = learning(mixture, tmp_path, steps=40)
    if engine:
        sampler = EngineSampler(run.policy, NativeSettings())
        run.collector = Collector(run.settings, run.policy, sampler, Task(PROBLEMS, "gsm8k", ""))
    assert all(".experts.lora_" in name for name, _ in run.policy.trainable())
    layers = [layer for layer in run.policy.lm.modules() if isinstance(layer, PackedLinear)]
    before = [buffer.clone() for layer in layers for buffer in layer.buffers()]
    rows = run.run()
    assert rows[0]["reward"] < 4
    assert fmean(row["reward"] for row in rows[-5:]) > 5  # of 6 letters
    assert max(row["mismatch/kl"] for row in rows) < 1e-6
    after = [buffer for layer in layers for buffer in layer.buffers()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    run.policy.save(tmp_path / "adapter")
    stored = load_policy(mixture / "nvfp4", tmp_path / "adapter", "float32", CPU)
    ids = torch.arange(5, 30)[None]
    with torch.no_grad():
        assert torch.equal(stored.lm(ids).logits, run.policy.lm(ids).logits)


def test_a_killed_run_continues_bit_for_bit(mixture, tmp_path, monkeypatch):
    both = {"rank": 4, "dropout": 0.0, "targets": ["q_proj", *EXPERTS]}
    changes = {"adapter": both, "noise": {"schedule": "linear"}}
    whole = learning(mixture, tmp_path / "whole", **changes)
    expected = whole.run()
    killed = learning(mixture, tmp_path / "killed", **changes)
    kill_at(4, killed, monkeypatch)
    continued = learning(mixture, tmp_path / "killed", **changes)
    assert untimed(continued.run()) == untimed(expected)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(continued)[name]), name


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4"])
def test_recomputed_blocks_and_cut_batches_have_the_same_gradients(mixture, tmp_path, weights):
    """MXFP4 is that of gpt-oss."""
    whole = learning(mixture, tmp_path / "a", weights=weights).step(1, 0)
    cut = {"gradient_checkpointing": True, "micro_batch_tokens": 20}
    again = learning(mixture, tmp_path / "b", weights=weights, **cut).step(1, 0)
    assert whole["grad_norm"] > 0
    for key in ("loss", "grad_norm", "entropy", "mismatch/kl"):
        assert again[key] == pytest.approx(whole[key], abs=1e-6, rel=1e-5)


def test_the_reference_is_the_base_without_adapters_of_experts(mixture, tmp_path):
    run = learning(mixture, tmp_path, loss={"kl": 0.1}, steps=3)
    rows = run.run()
    assert abs(rows[0]["reference/kl"]) < 1e-7
    assert rows[2]["reference/kl"] > 1e-5


def test_in_16_bits_products_are_those_of_the_autocast(mixture, tmp_path):
    """A and B stay float32, with float32 gradients, while passes round them as they do activations."""
    run = learning(mixture, tmp_path, dtype="bfloat16")
    exact = learning(mixture, tmp_path)
    [sample] = run.collector.collect(1, 0).samples[:1]
    found, expected = ([], [])
    for one, into in ((run, found), (exact, expected)):
        for name, parameter in one.policy.trainable():
            torch.manual_seed(len(name))
            parameter.data.normal_(std=0.05)
        logprobs, _ = logprobs_and_entropy(one.policy, micro_batch([sample], [0], CPU), 1.0)
        logprobs.sum().backward()
        into += [parameter.grad for _, parameter in one.policy.trainable()]
    for rough, fine in zip(found, expected, strict=True):
        assert rough.dtype == torch.float32
        assert (rough - fine).norm() < 0.1 * fine.norm()
