"""The portable products against float64, in Triton's interpreter, which `test_interpreter.py` starts.

The interpreter has no arithmetic of bfloat16, so activations are float32 here; `tests/gpu` has bfloat16.
"""

from typing import get_args

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.activations import ACT2FN

from qerl.formats.codecs import dequantize, nvfp4_global_scale, quantize
from qerl.formats.layouts import Words
from qerl.kernels.state import Activation, workspace
from qerl.kernels.triton.linear import Tile, dense, multiply, tile_for
from qerl.models.linear import PackedLinear, PortableLinear
from qerl.models.lora import register_lora
from tests.conftest import NIGHTLY

FORMATS = ("nvfp4", "mxfp4")
#: Rows of x in every tile, and on both sides of its edges.
ROWS = (1, 3, 8, 9, 17, 33, 65, 129)


class Layers(nn.Module):
    def __init__(self, weights_format, widths, columns, bias):
        super().__init__()
        self.anchor = nn.Linear(1, 1)  # PEFT takes the device from the first parameter
        weights = [torch.randn(width, columns) * 0.02 for width in widths]
        scale = nvfp4_global_scale(*weights[:2]) if weights_format == "nvfp4" else None
        for number, weight in enumerate(weights):
            # The third layer has a scale of its own, as a checkpoint may.
            packed = quantize(weight, weights_format, global_scale=scale if number < 2 else None)
            self.add_module(
                f"part{number}", PackedLinear.from_packed(packed, torch.randn(len(weight)) if bias else None)
            )

    def parts(self):
        return [module for name, module in self.named_children() if name.startswith("part")]


def layers_of(weights_format, widths, columns, bias=False, rank=0):
    model = Layers(weights_format, widths, columns, bias)
    if rank:
        # Without an adapter on the second layer, and with another rank on the third.
        targets = [f"part{number}" for number in range(len(widths)) if number != 1]
        config = LoraConfig(r=rank, lora_alpha=6, target_modules=targets, rank_pattern={"part2": 2})
        get_peft_model(model, register_lora(config))
    for name, parameter in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter, std=0.3)
    return model.parts()


def exact(layers, x):
    """The outputs of each layer in float64, by the codec and the definition of LoRA."""
    outs = []
    for layer in layers:
        base = getattr(layer, "base_layer", layer)
        y = x.double() @ dequantize(base.packed, torch.float32).double().T
        y = y if base.bias is None else y + base.bias.double()
        if base is not layer:
            a, b = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
            y = y + x.double() @ a.T @ b.T * layer.scaling["default"]
        outs.append(y)
    return outs


def assert_close(out, expected):
    assert (out.double() - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(("weights_format", "rank"), [("nvfp4", 4), ("nvfp4", 0), ("mxfp4", 70), ("mxfp4", 0)])
@pytest.mark.parametrize("kind", ["biased", "residual", *get_args(Activation)])
@torch.no_grad()
def test_products(kind, weights_format, rank):
    """Of three layers with biases, of one whose outputs are added, and of gate and up."""
    widths = {"biased": (72, 24, 19), "residual": (80,)}.get(kind, (136, 136))
    layers = layers_of(weights_format, widths, 384 if kind == "biased" else 256, bias=kind == "biased", rank=rank)
    product = PortableLinear(layers, torch.float32)
    for rows in ROWS if NIGHTLY or (kind, weights_format) == ("biased", "nvfp4") else ROWS[::4]:
        x, before = torch.randn(rows, layers[0].in_features), torch.randn(rows, 80)
        parts = exact(layers, x)
        out, expected, options = torch.full((rows, 136), torch.nan), parts[0], {"activation": kind}
        if kind == "biased":
            out, expected, options = torch.full((rows, 115), torch.nan), torch.cat(parts, 1), {}
        elif kind == "residual":
            out, expected, options = before.clone(), parts[0] + before, {"residual": True}
        else:
            expected = ACT2FN[kind](parts[0]) * parts[1]
        product(x, out, **options)
        assert_close(out, expected)


@torch.no_grad()
def test_every_division_of_the_columns_gives_the_product():
    layers = layers_of("nvfp4", (40,), 1152, rank=4)
    product, x = PortableLinear(layers, torch.float32), torch.randn(5, 1152)
    expected = exact(layers, x)[0]
    for programs in (1, 2, 3, 4, 9) if NIGHTLY else (1, 4, 9):
        out = torch.full((5, 40), torch.nan)
        multiply(product.operands, x, out, tile=Tile(16, 8, 4, 2, programs=programs))
        assert_close(out, expected)
        assert not workspace(x.device).get("arrivals", 1).any()  # the next launch counts from 0


@torch.no_grad()
def test_a_row_does_not_depend_on_the_others():
    product = PortableLinear(layers_of("nvfp4", (72,), 384, rank=4), torch.float32)
    for many, few in ((8, 3), (32, 20), (128, 70)):
        assert tile_for(many) == tile_for(few)
        x = torch.randn(many, 384)
        outs = [torch.full((rows, 72), torch.nan) for rows in (many, few)]
        product(x, outs[0])
        product(x[:few].contiguous(), outs[1])
        assert torch.equal(outs[0][:few], outs[1])


@pytest.mark.parametrize("weights_format", FORMATS)
@pytest.mark.parametrize("columns", [256, 160])
def test_unpacked_weights_are_the_codecs_bit_for_bit(weights_format, columns):
    packed = [quantize(torch.randn(rows, columns) * 3, weights_format) for rows in (40, 19)]
    if weights_format == "nvfp4":
        packed[0].tensors["weight_scale"].view(torch.uint8)[0, :8] = torch.arange(1, 9)  # subnormal ones too
    words = Words.pack(packed)
    for part, before in enumerate(packed):
        assert torch.equal(dense(words, part, torch.float32), dequantize(before, torch.float32))


@torch.no_grad()
def test_changed_adapters_and_biases_take_effect_at_sync():
    layers = layers_of("nvfp4", (72, 24, 19), 256, bias=True, rank=4)
    product, x, out = PortableLinear(layers, torch.float32), torch.randn(3, 256), torch.empty(3, 115)
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if "lora" in name or "bias" in name:
                parameter.add_(0.5)
    product.sync()
    product(x, out)
    assert_close(out, torch.cat(exact(layers, x), 1))
