"""Experts of a mixture in a policy; `tests.parity.test_families` compares them with other libraries."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from qerl.checkpoints.folder import read_headers
from qerl.layers.experts import Experts, Float32Router
from qerl.layers.packed_linear import PackedLinear, dense_weights, unpacked_bytes
from qerl.plan.doctor import asked_model, diagnose
from qerl.plan.memory_model import StepSettings
from qerl.policy.export import write_dense
from qerl.policy.loading import load_model
from qerl.policy.policy import trained_in_full
from qerl.quantization.checkpoint import quantize_checkpoint
from tests.tiny import tiny_family

TOKENS = torch.randint(2, 100, (2, 40), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("experts")
    quantize_checkpoint(tiny_family(root / "bf16", "qwen3_moe", dtype=torch.bfloat16), root / "nvfp4", "nvfp4")
    return root / "nvfp4"


def test_every_expert_is_packed_and_unpacked_by_itself(folder, tmp_path):
    """Samplers and updates may keep attention unpacked, and no expert."""
    model = load_model(folder, torch.float32)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert len(layers) == 2 * (4 + 4 * 3)
    attention = {name: layer for name, layer in layers.items() if "self_attn" in name}
    assert unpacked_bytes(model, torch.float32) == 4 * sum(x.in_features * x.out_features for x in attention.values())
    write_dense(folder, tmp_path / "dense", torch.float32)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    with torch.no_grad(), dense_weights(model, torch.float32):
        assert {name for name, layer in layers.items() if layer._dense is not None} == attention.keys()
        found, expected = (lm(TOKENS).logits.log_softmax(-1) for lm in (model, stock))
    assert (found - expected).abs().max() < 1e-4


def test_the_router_is_float32_and_dense(folder):
    """In bfloat16 too, where rounding would otherwise choose between experts that score alike."""
    model = load_model(folder, torch.bfloat16)
    assert isinstance(model.get_submodule("model.layers.0.mlp.experts"), Experts)
    router = model.get_submodule("model.layers.0.mlp.gate")
    assert isinstance(router, Float32Router)
    assert router.weight.dtype == torch.float32
    assert read_headers(folder)["model.layers.0.mlp.gate.weight"].dtype == "BF16"
    hidden = torch.randn(50, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        scores = router(hidden)[0]
    assert torch.equal(scores, hidden.float() @ router.weight.T)


def test_doctor_predicts_no_memory(folder):
    told = diagnose(asked_model(str(folder), None), StepSettings("nvfp4", 4, 2, 2, 16, 16, recompute="auto"))
    assert told.memory is None
    assert "the memory of a mixture of experts isn't predicted" in told.notes


def test_a_mixture_that_was_trained_in_full_is_saved_in_the_hubs_layout(folder, tmp_path):
    policy = trained_in_full(folder.parent / "bf16", "float32", torch.device("cpu"))
    with torch.no_grad():
        expected = policy.lm(TOKENS).logits
    policy.save(tmp_path / "saved")  # which rounds matrices to bfloat16, as these are
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(stock(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
