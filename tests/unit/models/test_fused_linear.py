"""Layers computed as one product against the same layers one by one."""

from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.activations import ACT2FN

from qerl.formats.codecs import PACKED_FORMATS, quantize, split_rows
from qerl.kernels.state import Activation
from qerl.models import linear
from qerl.models.linear import PackedLinear, W4Linear, fuse, product_class
from qerl.models.lora import register_lora
from qerl.settings.base import ConfigError

WIDTHS = {"q_proj": 64, "k_proj": 32, "v_proj": 32}


class Projections(nn.Module):
    def __init__(self, weights, bias):
        super().__init__()
        for name, width in WIDTHS.items():
            layer = nn.Linear(128, width, bias=bias)
            if weights != "dense":
                layer = PackedLinear.from_packed(quantize(layer.weight.data, weights), layer.bias)
            setattr(self, name, layer)
        self.norm = nn.LayerNorm(128)  # PEFT takes the device from the first parameter


@pytest.fixture(params=["dense", *PACKED_FORMATS])
def weights(request):
    return request.param


def adapted(weights, bias=True, targets=("q_proj", "v_proj")):
    """Projections with adapters of different ranks on `targets`, all of whose values matter."""
    torch.manual_seed(0)
    model = Projections(weights, bias)
    config = register_lora(
        LoraConfig(r=4, lora_alpha=6, target_modules=list(targets), rank_pattern={"v_proj": 2}, lora_dropout=0.5)
    )
    get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def layers_of(model):
    return [getattr(model, name) for name in WIDTHS]


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_the_product_is_that_of_the_layers_with_their_adapters(weights, bias):
    layers = layers_of(adapted(weights, bias))
    x = torch.randn(5, 128)
    expected = torch.cat([layer(x) for layer in layers], -1)
    linear = fuse(layers, torch.float32)
    out = torch.full((5, 128), torch.nan)
    linear(x, out)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    residual = torch.randn(5, 128)
    out.copy_(residual)
    linear(x, out, residual=True)
    torch.testing.assert_close(out, residual + expected, atol=1e-5, rtol=1e-5)
    gated = torch.full((5, 64), torch.nan)
    for activation in get_args(Activation):
        linear(x, gated, activation=activation)
        torch.testing.assert_close(gated, ACT2FN[activation](expected[:, :64]) * expected[:, 64:], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_changed_adapters_take_effect_at_sync(weights):
    model = adapted(weights)
    linear, x, out = fuse(layers_of(model), torch.float32), torch.randn(3, 128), torch.empty(3, 128)
    for name, parameter in model.named_parameters():
        if "lora" in name or "bias" in name:
            parameter.add_(0.5)
    linear.sync()
    linear(x, out)
    torch.testing.assert_close(out, torch.cat([layer(x) for layer in layers_of(model)], -1), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_dense_weights_are_neither_copied_nor_changed():
    layers = layers_of(adapted("dense"))
    before = [layer.weight.clone() for layer in layers]
    linear, x = fuse(layers, torch.float32), torch.randn(3, 128)
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(layers, before, strict=True))
    addresses = [layer.weight.data_ptr() for layer in layers]
    fuse(layers, torch.float32)
    assert [layer.weight.data_ptr() for layer in layers] == addresses
    layers[1].weight.mul_(2)
    out = torch.empty(3, 128)
    linear(x, out)
    torch.testing.assert_close(out, torch.cat([layer(x) for layer in layers], -1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("weights_format", ["nvfp4", "mxfp4"])
def test_the_hopper_product_reads_a_fused_gate_and_up_as_it_reads_two(weights_format):
    """Weights and adapters of both halves, which share A, as its kernel gets them; the kernel needs a GPU."""
    torch.manual_seed(0)
    both = nn.Module()
    both.anchor = nn.Linear(1, 1)
    both.gate_up_proj = PackedLinear.from_packed(quantize(torch.randn(48, 256), weights_format))
    weight = both.gate_up_proj.packed
    two = [PackedLinear.from_packed(half) for half in split_rows(weight, 24)]
    get_peft_model(both, register_lora(LoraConfig(r=4, lora_alpha=6, target_modules=["gate_up_proj"])))
    nn.init.normal_(both.gate_up_proj.lora_B["default"].weight)
    fused, apart = W4Linear([both.gate_up_proj], interleaved=True), W4Linear(two, interleaved=True)
    found, expected = fused.operands, apart.operands
    assert torch.equal(found.tiles.data, expected.tiles.data)
    assert (found.tiles.parts, found.tiles.factors) == (expected.tiles.parts, expected.tiles.factors)
    down, up = (getattr(both.gate_up_proj, name)["default"].weight.bfloat16() for name in ("lora_A", "lora_B"))
    for a, b, rows in zip(found.down, found.ups, up.split(24), strict=True):
        assert torch.equal(a[:4], down)
        assert torch.equal(b[:, :4], rows)
        assert not a[4:].any()
    assert found.scales == (1.5, 1.5)
    again = W4Linear([both.gate_up_proj], interleaved=True)
    assert again.tiles is fused.tiles
    assert again.rank == 16


def test_a_layer_that_is_not_linear_is_an_error():
    with pytest.raises(ConfigError, match="doesn't support layers of Conv1d"):
        fuse([nn.Conv1d(2, 2, 1)], torch.float32)


def test_a_variant_of_lora_is_an_error():
    model = Projections("dense", True)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"], use_dora=True))
    with pytest.raises(ConfigError, match="only plain LoRA"):
        fuse(layers_of(model), torch.float32)


def test_kernels_are_those_of_the_layers_gpu(monkeypatch):
    """Each layer has the kernels of its GPU, whichever one is the process's present GPU."""
    kinds = {0: (9, 0), 1: (8, 9)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: kinds[device.index])
    chosen = []
    for index in kinds:
        layer = SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda", index)))
        capability = linear._capability(layer)
        chosen.append(product_class(capability, "nvfp4", [(256, 256)], torch.bfloat16).__name__)
    assert chosen == ["W4Linear", "PortableLinear"]
