"""The memory model of adapters of experts against a policy's own tensors."""

from dataclasses import replace

import pytest
import torch

from qerl.checkpoints.shapes import ModelShape
from qerl.doctor import candidate, diagnose
from qerl.memory_model import StepSettings, kept_of_experts
from qerl.models.expert_adapters import adapt_experts
from qerl.models.experts import Experts, GroupedAdapters
from qerl.models.policy import with_adapter
from qerl.models.quantize import quantize_checkpoint
from qerl.models.structure import empty_model
from qerl.rl.memory import saved_for_backward
from qerl.rollout.decoder import Decoder
from qerl.settings.run import AdapterSettings, NativeSettings
from tests.families import FAMILIES
from tests.tiny import tiny_family, tiny_gpt_oss

EXPERTS = ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_the_adapter_and_the_samplers_copies_have_the_bytes_of_their_tensors(tmp_path, name):
    folder = tmp_path / "packed"
    if name == "gpt_oss":
        tiny_gpt_oss(folder)
    else:
        quantize_checkpoint(tiny_family(tmp_path / "bf16", name, dtype=torch.bfloat16), folder, "nvfp4")
    adapter = AdapterSettings(rank=16, targets=[*ATTENTION, *EXPERTS])
    policy = with_adapter(folder, adapter, "bfloat16", 0, torch.device("cpu"))
    asked = candidate(str(folder), None)
    settings = StepSettings(asked.weights, 16, 2, 2, 16, 16, recompute="auto", experts=True)
    memory, without = (diagnose(asked, one).memory for one in (settings, replace(settings, experts=False)))
    sizes = {name: parameter.nbytes for name, parameter in policy.trainable() if ".lora_" in name}
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert (memory.adapter, without.adapter) == (sum(sizes.values()), sum(sizes.values()) - of_experts)
    copies = [one for one in Decoder(policy, NativeSettings().kernels).linears if isinstance(one, GroupedAdapters)]
    copied = sum(tensor.nbytes for one in copies for tensor in (one.down, one.up))
    assert memory.adapter_copies - without.adapter_copies == copied
    stacks, numbers = sum(".experts." in name for name in sizes), of_experts // 4
    # Two bytes a number, two float32 scales a block of 256, and the codes' two tables of each tensor.
    assert memory.optimizer - without.optimizer == 2 * numbers + 2 * 4 * numbers // 256 + 2048 * stacks


@pytest.mark.parametrize("chosen", [1, 3])
def test_what_a_mixture_keeps_for_the_gradients_of_its_adapters(chosen):
    """In float32, where inputs of both products and of B take twice the bytes."""
    config = FAMILIES["qwen3_moe"].config(num_experts_per_tok=chosen)
    mlp = empty_model(config, torch.float32).to_empty(device="cpu").requires_grad_(False).model.layers[0].mlp
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x, kept = torch.randn(1, 50, 64, requires_grad=True), []
    for rank in (0, 4):
        if rank:
            assert isinstance(mlp.experts, Experts)
            adapt_experts(mlp, ["gate_proj", "up_proj", "down_proj"], rank, 4)
        with saved_for_backward(mlp) as saved:
            _ = mlp(x)
        kept.append(saved.bytes / 50)
    settings = StepSettings("nvfp4", 4, 1, 1, 25, 25, recompute=False, experts=True)
    assert kept[1] - kept[0] == 2 * kept_of_experts(ModelShape.of(config.to_dict()), settings)
