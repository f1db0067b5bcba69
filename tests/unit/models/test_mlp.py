"""The project's MLP in place of transformers': the same numbers and names."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from qerl.models.experts import GatedMLP, clamped_glu, fuse_mlps
from qerl.models.policy import load_policy, trained_in_full, with_adapter
from qerl.settings.run import AdapterSettings
from tests.tiny import tiny_llama, tiny_qwen2, tiny_qwen3

BUILDERS = {"qwen2": tiny_qwen2, "qwen3": tiny_qwen3, "llama": tiny_llama}
IDS = torch.tensor([[5, 9, 2, 77, 31, 8]])


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def outcome(lm):
    """The logits, and the gradient of every parameter by name."""
    logits = lm(IDS).logits
    logits.square().mean().backward()
    return logits.detach(), {name: parameter.grad for name, parameter in lm.named_parameters()}


def fused(lm):
    return [module for module in lm.modules() if isinstance(module, GatedMLP)]


@pytest.mark.parametrize("architecture", BUILDERS)
def test_outputs_gradients_and_names_stay_the_same(architecture, tmp_path):
    folder = BUILDERS[architecture](tmp_path / "m")
    plain, ours = loaded(folder), loaded(folder)
    fuse_mlps(ours)
    assert len(fused(ours)) == 2
    assert list(ours.state_dict()) == list(plain.state_dict())
    (a, grads), (b, expected) = outcome(ours), outcome(plain)
    assert torch.equal(a, b)
    assert list(grads) == list(expected)
    assert all(torch.equal(grads[name], expected[name]) for name in expected)


def test_float64_is_exact():
    class Qwen2MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8).double() for _ in range(3))
            self.act_fn = nn.SiLU()

    block = nn.Sequential(Qwen2MLP())
    fuse_mlps(block)
    (mlp,) = fused(block)
    assert torch.autograd.gradcheck(mlp, torch.randn(3, 8, dtype=torch.float64, requires_grad=True))


def test_the_gate_of_gpt_oss_saves_its_input_alone():
    both = torch.randn(5, 12, dtype=torch.float64, requires_grad=True) * 6
    assert torch.autograd.gradcheck(lambda x: clamped_glu(x, 1.702, 7.0), both.detach().requires_grad_())
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda kept: kept):
        clamped_glu(both, 1.702, 7.0)
    assert [tensor.shape for tensor in saved] == [both.shape]


def test_another_activation_is_left_alone(tmp_path):
    lm = loaded(tiny_qwen2(tmp_path / "m", hidden_act="gelu"))
    before = [type(module) for module in lm.modules()]
    fuse_mlps(lm)
    assert [type(module) for module in lm.modules()] == before


def test_a_class_that_is_not_known_is_left_alone(tmp_path):
    """Phi-3's fuses gate and up; a name with SiLU and the three projections may still compute something else."""

    class OtherMLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
            self.act_fn = nn.SiLU()

    block = nn.Sequential(OtherMLP())
    fuse_mlps(block)
    assert isinstance(block[0], OtherMLP)


def test_every_policy_has_them_and_adapters_find_their_layers(tmp_path):
    folder = tiny_qwen2(tmp_path / "m")
    policies = [
        trained_in_full(folder, "float32", torch.device("cpu")),
        load_policy(folder, None, "float32", torch.device("cpu")),
        with_adapter(folder, AdapterSettings(rank=2), "float32", 0, torch.device("cpu")),
    ]
    assert [len(fused(policy.lm)) for policy in policies] == [2, 2, 2]
    names = [name for name, _ in policies[-1].trainable() if ".mlp." in name]
    assert len(names) == 2 * 3 * 2  # Blocks, projections, A and B.


def test_a_model_trained_in_full_is_saved_under_transformers_names(tmp_path):
    policy = trained_in_full(tiny_qwen2(tmp_path / "m"), "float32", torch.device("cpu"))
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.add_(0.01)
    policy.save(tmp_path / "out")
    expected, saved = policy.lm.state_dict(), loaded(tmp_path / "out").state_dict()
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name].float()) for name in saved)
