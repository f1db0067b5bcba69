"""Packed layers against dense ones with the unpacked weight, and products of layers with one input."""

import copy
import io
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.activations import ACT2FN

from qerl.formats.codecs import PACKED_FORMATS, dequantize, quantize, split_rows
from qerl.kernels.cuda import w4a16
from qerl.kernels.state import Activation
from qerl.models import linear
from qerl.models.linear import Cohort, PackedLinear, W4Linear, dense_weights, fuse, product_class
from qerl.models.lora import register_lora
from qerl.settings.base import ConfigError

ROWS, COLUMNS = 96, 128
formats = pytest.mark.parametrize("weights_format", PACKED_FORMATS)


def seeded(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer_pair(weights_format, dtype, bias=True):
    """A packed layer, and a dense one with the very weights it stands for."""
    packed = quantize(seeded(ROWS, COLUMNS), weights_format)
    offset = seeded(ROWS, seed=1, dtype=dtype) if bias else None
    dense = nn.Linear(COLUMNS, ROWS, bias=bias, dtype=dtype)
    dense.weight = nn.Parameter(dequantize(packed, dtype))
    if bias:
        dense.bias = nn.Parameter(offset.clone())
    return PackedLinear.from_packed(packed, offset), dense


@formats
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_forward_and_gradients_equal_the_dense_layer(weights_format, dtype, bias):
    layer, dense = layer_pair(weights_format, dtype, bias)
    x = seeded(2, 5, COLUMNS, seed=2, dtype=dtype).requires_grad_()
    y = x.detach().clone().requires_grad_()
    cotangent = seeded(2, 5, ROWS, seed=3, dtype=dtype)
    out, expected = layer(x), dense(y)
    out.backward(cotangent)
    expected.backward(cotangent)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(x.grad, y.grad)
    if bias:
        torch.testing.assert_close(layer.bias.grad, dense.bias.grad)


@formats
def test_nothing_dense_is_saved_for_backward(weights_format):
    layer, dense = layer_pair(weights_format, torch.float32)
    saved = []

    def count(tensor):
        saved.append(tensor.numel())
        return tensor

    x = seeded(3, COLUMNS).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        out = layer(x)
    assert sum(saved) == 0
    assert layer._dense is None
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        dense(x)
    assert ROWS * COLUMNS in saved, "the hook sees what a dense layer saves"
    out.sum().backward()


@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kept_dense_weights_give_the_same_values_and_are_dropped(weights_format, dtype):
    model = nn.Sequential(layer_pair(weights_format, dtype, bias=False)[0], nn.Tanh(), nn.Linear(ROWS, 4, dtype=dtype))
    layer = model[0]
    x = seeded(7, COLUMNS, seed=5, dtype=dtype).requires_grad_()
    expected = model(x)
    expected.sum().backward()
    gradient, x.grad = x.grad, None
    with dense_weights(model, dtype):
        assert layer.dense_weight(dtype) is layer.dense_weight(dtype)
        kept = model(x)
        kept.sum().backward()
        # Another dtype than the kept one is unpacked on the fly.
        assert layer(x.detach().double()).dtype == torch.float64
        with dense_weights(model, dtype):
            pass
        assert layer._dense is not None
    assert torch.equal(kept, expected)
    assert torch.equal(x.grad, gradient)
    assert layer._dense is None
    with pytest.raises(KeyError), dense_weights(model, dtype):
        raise KeyError
    assert layer._dense is None


@formats
def test_state_survives_casts_copies_and_serialisation(weights_format):
    layer, _ = layer_pair(weights_format, torch.float32)
    reference = {name: tensor.clone() for name, tensor in layer.packed.tensors.items()}
    layer.to(torch.bfloat16).float().half().double()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [layer, copy.deepcopy(layer), torch.load(file, weights_only=False)]
    fresh = PackedLinear(COLUMNS, ROWS, weights_format, bias=True)
    fresh.load_state_dict(layer.state_dict())
    for each in [*copies, fresh]:
        for name, tensor in reference.items():
            found = each.packed.tensors[name]
            assert found.dtype == tensor.dtype
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
    assert layer.bias.dtype == torch.float64
    meta = layer.to("meta")
    assert all(tensor.is_meta for tensor in meta.packed.tensors.values())


WIDTHS = {"q_proj": 64, "k_proj": 32, "v_proj": 32}


class Projections(nn.Module):
    def __init__(self, weights, bias):
        super().__init__()
        for name, width in WIDTHS.items():
            layer = nn.Linear(128, width, bias=bias)
            kind = ("nvfp4" if name == "k_proj" else "dense") if weights == "in part" else weights
            if kind != "dense":
                layer = PackedLinear.from_packed(quantize(layer.weight.data, kind), layer.bias)
            setattr(self, name, layer)
        self.norm = nn.LayerNorm(128)  # PEFT takes the device from the first parameter


@pytest.fixture(params=["dense", "in part", *PACKED_FORMATS])
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
    assert found.scales.tolist() == [1.5, 1.5]
    again = W4Linear([both.gate_up_proj], interleaved=True)
    assert again.tiles is fused.tiles
    assert [a.shape[0] for a in again.operands.down] == [16, 16]  # the rank in tiles of 16


@torch.no_grad()
def test_a_run_of_stacked_ones_that_diverged_becomes_nan_by_its_scale_alone(monkeypatch):
    """As the Hopper product's kernel gets them: others multiply its B by 0, so B must be finite."""
    monkeypatch.setattr(w4a16, "MOST_STACKED_RANKS", 64)
    torch.manual_seed(0)
    base = PackedLinear.from_packed(quantize(torch.randn(64, 256), "nvfp4"))
    models = []
    for _ in range(3):
        model = nn.Module()
        model.anchor, model.proj = nn.Linear(1, 1), base
        get_peft_model(model, register_lora(LoraConfig(r=4, lora_alpha=6, target_modules=["proj"])))
        nn.init.normal_(model.proj.lora_B["default"].weight)
        models.append(model)
    product = W4Linear([models[0].proj], cohort=Cohort(models))
    operands, up = product.operands, models[1].proj.lora_B["default"].weight
    sound, diverged = up.clone(), up.index_fill(0, torch.tensor([5]), torch.inf)
    for value, scales in ((diverged, [1.5, torch.nan, 1.5]), (sound, [1.5, 1.5, 1.5])):
        up.copy_(value)
        product.sync()
        assert operands.ups[0].isfinite().all()
        torch.testing.assert_close(operands.scales, torch.tensor(scales), equal_nan=True)
        assert torch.equal(operands.ups[0][6:, 16:20], up[6:].bfloat16())


def test_a_layer_that_is_not_linear_or_has_a_variant_of_lora_is_an_error():
    with pytest.raises(ConfigError, match="doesn't support layers of Conv1d"):
        fuse([nn.Conv1d(2, 2, 1)], torch.float32)
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
