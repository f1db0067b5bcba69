"""The memory model of hybrids of delta nets and attention, against models and what they keep."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from qerl.checkpoints.shapes import ModelShape
from qerl.kernels.packed_sequences import Packing
from qerl.kernels.state import PAGE, DeltaHeads, DeltaStates
from qerl.memory_model import StepSettings, cache_bytes, net_kept_bytes, step_memory, weight_bytes, weight_numbers
from qerl.models.structure import empty_model
from tests.families import FAMILIES

#: Widths that differ from each other, so that none can stand for another.
CONFIG = FAMILIES["qwen3_5"].config(
    hidden_size=128,
    intermediate_size=320,
    num_hidden_layers=8,
    layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
    linear_key_head_dim=32,
    linear_value_head_dim=48,
)
ASKED = StepSettings("nvfp4", 16, 16, 8, 128, 1024, True)


@pytest.fixture(scope="module")
def shape():
    return ModelShape.of(CONFIG.to_dict())


@pytest.fixture(scope="module")
def model():
    return empty_model(CONFIG, torch.bfloat16)


def test_weights_are_those_of_the_model(shape, model):
    """But for convolutions and norms of heads; norms of blocks are float32 in a policy."""
    few = sum(p.numel() for name, p in model.named_parameters() if "linear_attn" in name and "proj" not in name)
    few += sum(p.numel() for name, p in model.named_parameters() if "q_norm" in name or "k_norm" in name)
    few += model.model.norm.weight.numel()
    numbers = sum(p.numel() for p in model.parameters()) - few
    assert weight_numbers(shape) == numbers
    assert weight_bytes(shape, "bf16") == 2 * numbers + 8 * 2 * 128 * 2
    nets = sum(m.weight.numel() for n, m in model.named_modules() if "linear_attn" in n and isinstance(m, nn.Linear))
    packed = weight_bytes(shape, "bf16") - weight_bytes(shape, "nvfp4")
    linears = sum(m.weight.numel() for m in model.model.layers.modules() if isinstance(m, nn.Linear))
    assert packed == pytest.approx((linears - nets) * (2 - 4.5 / 8), rel=1e-3)
    narrow = sum(m.weight.numel() for n, m in model.named_modules() if n.endswith(("in_proj_b", "in_proj_a")))
    of_all = weight_bytes(shape, "bf16") - weight_bytes(shape.with_packed_nets(), "nvfp4")
    assert of_all == pytest.approx((linears - narrow) * (2 - 4.5 / 8), rel=1e-3)
    assert shape.with_packed_nets().adapter_numbers(4) == shape.adapter_numbers(4)
    assert shape.with_packed_nets().products == shape.products


def test_the_cache_has_pages_of_attention_and_states_of_all_nets(shape):
    heads = DeltaHeads(2, 4, 32, 48, torch.zeros(320, 4), *[torch.zeros(4)] * 2, torch.zeros(48), 1e-6)
    made = DeltaStates.empty(heads, 6, 128, torch.bfloat16, torch.device("cpu"))
    page = 2 * 2 * 2 * 16 * PAGE * 2
    assert cache_bytes(shape, ASKED)[1] == made.nbytes + page * (128 * 19 + 20)


def test_a_net_keeps_what_its_backward_pass_reads(shape, model):
    """As counted on a CPU, where float32 copies and chunks are those of a GPU."""
    net = type(model.model.layers[0].linear_attn)(CONFIG, 0).bfloat16().requires_grad_(False)
    weights, kept = {p.untyped_storage().data_ptr() for p in net.parameters()}, {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    row = torch.randn(1, 512, 128, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        net(row, packing=Packing.of([512], [None], torch.device("cpu")))
    counted = sum(storage.nbytes() for place, storage in kept.items() if place not in weights)
    assert net_kept_bytes(shape.nets) * 512 == pytest.approx(counted, rel=0.03)


def test_a_27b_shape_trains_under_40_gb():
    """The widths of Qwen3.5-27B; states bound the sequences that are decoded together, and so the cache."""
    wide = FAMILIES["qwen3_5"].config(
        hidden_size=5120, num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4, head_dim=256,
        intermediate_size=17408, vocab_size=248320, linear_num_key_heads=16, linear_num_value_heads=48,
        linear_key_head_dim=128, linear_value_head_dim=128,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 16,
    )  # fmt: skip
    asked = replace(ASKED, micro_batch_tokens=4096, sleep=True)
    memory = step_memory(ModelShape.of(wide.to_dict()), asked, 40e9)
    assert memory.weights == pytest.approx(26.8e9, rel=0.01)
    assert memory.kv_cache < memory.kv_cache_wanted == pytest.approx(30.3e9, rel=0.02)
    assert 36e9 < memory.peak < 39e9
    packed = step_memory(ModelShape.of(wide.to_dict()).with_packed_nets(), asked, 40e9)
    assert packed.weights == pytest.approx(18.8e9, rel=0.01)
    assert packed.kv_cache > 1.4 * memory.kv_cache


def test_a_hybrid_of_experts_has_the_weights_of_its_model():
    """Widths that differ from each other; routers and gates beside what `weight_numbers` counts."""
    config = FAMILIES["qwen3_5_moe"].config(
        hidden_size=192, moe_intermediate_size=128, shared_expert_intermediate_size=320, num_experts=6
    )
    shape, model = ModelShape.of(config.to_dict()), empty_model(config, torch.bfloat16)
    counted = ("proj", "embed_tokens", "lm_head", "layernorm")
    numbers = sum(p.numel() for name, p in model.named_parameters() if any(part in name for part in counted))
    assert weight_numbers(shape) == numbers
    norms, routers, gates = 2 * 2 * 192, 2 * 6 * 192, 2 * 192
    assert weight_bytes(shape, "bf16") == 2 * numbers + 2 * norms + 4 * routers + 2 * gates
