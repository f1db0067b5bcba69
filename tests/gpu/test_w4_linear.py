"""The decode product and the unpacking kernel against float64, on fresh random inputs and poisoned outputs."""

import pytest
import torch
from torch import nn

from qerl.config import AdapterSettings
from qerl.kernels import tiles as layout
from qerl.kernels.unpack import dense
from qerl.quant.formats import dequantize, nvfp4_global_scale, quantize
from qerl.quant.linear import PackedLinear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda")
#: Rows of x on both sides of every variant's limit, and more than one row block.
ROWS = (1, 3, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 256, 300)
#: bfloat16 inputs are exact here; A x and the output are rounded to bfloat16.
TOLERANCE = 6e-3
SMALL, LARGE = (256, 128, 512), (3584, 512, 18944)


def shapes_of(kind, size):
    hidden, narrow, wide = size
    return {
        "qkv": [(hidden, hidden), (narrow, hidden), (narrow, hidden)],
        "o": [(hidden, hidden)],
        "gate_up": [(wide, hidden), (wide, hidden)],
        "down": [(hidden, wide)],
    }[kind]


def layers_of(kind, size, weights_format):
    weights = [torch.randn(shape, device=DEVICE) * 0.02 for shape in shapes_of(kind, size)]
    scale = nvfp4_global_scale(*weights) if weights_format == "nvfp4" else None
    layers = nn.Module()
    for i, weight in enumerate(weights):
        packed = quantize(weight, weights_format, global_scale=scale)
        bias = torch.randn(len(weight), device=DEVICE) if kind == "qkv" else None
        layers.add_module(f"part{i}", PackedLinear.from_packed(packed, bias))
    return layers


def with_lora(layers, rank):
    from peft import LoraConfig, inject_adapter_in_model

    from qerl.models.policy import POLICY_ADAPTER
    from qerl.quant.lora import register_lora

    names = [name for name, _ in layers.named_children()]
    # PEFT reads the device from a model's first parameter; packed layers have buffers alone.
    layers.register_parameter("anchor", nn.Parameter(torch.zeros(1, device=DEVICE)))
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names)
    register_lora(config)
    inject_adapter_in_model(config, layers, adapter_name=POLICY_ADAPTER)
    for name, parameter in layers.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.5)
        if "lora_A" in name:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return layers


def reference(layers, weights, x, kind, before):
    """Float64; A, B and A x in bfloat16, as the product has them."""
    outputs = []
    for layer, weight in zip(layers.children(), weights, strict=True):
        base = getattr(layer, "base_layer", layer)
        y = x.double() @ weight.double().T
        if base.bias is not None:
            y = y + base.bias.double()
        if base is not layer:
            a, b = (part["default"].weight.bfloat16().double() for part in (layer.lora_A, layer.lora_B))
            y = y + (x.double() @ a.T * layer.scaling["default"]).bfloat16().double() @ b.T
        outputs.append(y)
    if kind == "gate_up":
        return nn.functional.silu(outputs[0]) * outputs[1]
    y = torch.cat(outputs, dim=1)
    return y if before is None else y + before.double()


@pytest.mark.parametrize("kind", ["qkv", "o", "gate_up", "down"])
@pytest.mark.parametrize("weights_format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("size", "ranks"), [(SMALL, (0, 16, 40, 128)), (LARGE, (16, 64))], ids=["small", "7b"])
def test_products_are_those_of_float64(kind, weights_format, size, ranks):
    from qerl.kernels.linear import W4Linear

    for rank in ranks:
        layers = layers_of(kind, size, weights_format)
        weights = [dequantize(layer.packed, torch.float32) for layer in layers.children()]
        if rank:
            with_lora(layers, rank)
        product = W4Linear(list(layers.children()), interleaved=kind == "gate_up")
        for rows in ROWS if size is SMALL else (1, 5, 16, 32, 64, 128, 256):
            x = torch.randn(rows, weights[0].shape[1], device=DEVICE).bfloat16()
            width = product.out_features // (2 if kind == "gate_up" else 1)
            before = torch.randn(rows, width, device=DEVICE).bfloat16() if kind in ("o", "down") else None
            options = {"residual": before is not None, "silu": kind == "gate_up"}
            outs = []
            for _ in range(2):
                out = x.new_full((rows, width), float("nan")) if before is None else before.clone()
                product(x, out, **options)
                outs.append(out)
            exact = reference(layers, weights, x, kind, before)
            assert (outs[0].double() - exact).norm() <= TOLERANCE * exact.norm(), (rank, rows)
            assert torch.equal(*outs), "not deterministic"


@pytest.mark.parametrize("rows", [(8, 3), (16, 9), (32, 20)])
def test_a_row_does_not_depend_on_the_others(rows):
    """Of the same variant: what a bucket of the engine needs."""
    from qerl.kernels.linear import W4Linear

    many, few = rows
    product = W4Linear(list(with_lora(layers_of("o", LARGE, "nvfp4"), 16).children()))
    x = torch.randn(many, LARGE[0], device=DEVICE).bfloat16()
    outs = [x.new_zeros(len(part), LARGE[0]) for part in (x, x[:few])]
    product(x, outs[0])
    product(x[:few].contiguous(), outs[1])
    assert torch.equal(outs[0][:few], outs[1])


@pytest.mark.parametrize("weights_format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("kind", ["qkv", "gate_up"])
def test_unpacked_weights_are_the_codecs_bit_for_bit(kind, weights_format):
    layers = list(layers_of(kind, SMALL, weights_format).children())
    expected = [dequantize(layer.packed, torch.bfloat16) for layer in layers]
    tiles = layout.pack([layer.packed for layer in layers], interleaved=kind == "gate_up")
    for part, weight in enumerate(expected):
        assert torch.equal(dense(tiles, part), weight)


def test_few_and_many_rows_in_turn_leave_nothing_behind():
    """The launches share memory for sums; one variant's must not reach the next."""
    from qerl.kernels.linear import W4Linear

    layers = with_lora(layers_of("qkv", SMALL, "nvfp4"), AdapterSettings().rank)
    weights = [dequantize(layer.base_layer.packed, torch.float32) for layer in layers.children()]
    product = W4Linear(list(layers.children()))
    for rows in (4, 65, 16, 128, 1, 32, 64, 2):
        x = torch.randn(rows, SMALL[0], device=DEVICE).bfloat16()
        out = x.new_full((rows, product.out_features), float("nan"))
        product(x, out)
        exact = reference(layers, weights, x, "qkv", None)
        assert (out.double() - exact).norm() <= TOLERANCE * exact.norm(), rows


# --- A x ahead of the product ---


def close(found, exact, tolerance):
    return (found.double() - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("kind", ["qkv", "gate_up"])
@pytest.mark.parametrize(("size", "rank"), [(SMALL, 16), (SMALL, 40), (LARGE, 16), (LARGE, 64)])
def test_the_norm_computes_a_x_of_what_it_writes(kind, size, rank):
    from qerl.kernels import reference as described
    from qerl.kernels.linear import W4Linear
    from qerl.kernels.norm import rms_norm

    layers = with_lora(layers_of(kind, size, "nvfp4"), rank)
    for part, layer in enumerate(layers.children()):
        layer.scaling["default"] = 2.0 + part
    product = W4Linear(list(layers.children()), interleaved=kind == "gate_up")
    weight = (1 + torch.randn(size[0], device=DEVICE) * 0.3).bfloat16()
    for rows, noise in ((1, None), (3, torch.randn(size[0], device=DEVICE) * 0.1), (8, None)):
        x = torch.randn(rows, size[0], device=DEVICE).mul_(3).bfloat16()
        ahead = product.shrinks_ahead(rows)
        ahead.out.fill_(float("nan"))
        normed = rms_norm(x, weight, noise, 1e-6, ahead)
        found = ahead.out.clone()
        assert torch.equal(rms_norm(x, weight, noise, 1e-6, ahead), normed)
        assert torch.equal(ahead.out, found), "not deterministic"
        scale = weight.double() + (0 if noise is None else noise.double())
        exact = scale * x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(normed.double(), exact, atol=2e-2, rtol=1e-2)
        # A's rows behind an adapter's rank are zero, and so is A x.
        width = product.rank
        expected = torch.zeros(rows, len(ahead.a), dtype=torch.float64, device=DEVICE)
        for part, layer in enumerate(layers.children()):
            a = layer.lora_A["default"].weight.bfloat16().double()
            expected[:, part * width : part * width + rank] = normed.double() @ a.T * layer.scaling["default"]
        assert close(found, expected, 2**-8)
        described.rms_norm(x, weight, noise, 1e-6, ahead)
        assert close(found, ahead.out.double(), TOLERANCE)


@pytest.mark.parametrize("kind", ["qkv", "gate_up"])
@pytest.mark.parametrize(("size", "ranks"), [(SMALL, (16, 40, 64)), (LARGE, (16, 64))], ids=["small", "7b"])
def test_a_product_of_given_a_x_is_that_of_float64(kind, size, ranks):
    """In turn with products that compute A x themselves, whose sums and counters must be as if there were no others."""
    from qerl.kernels.linear import W4Linear
    from qerl.kernels.norm import rms_norm

    weight = torch.ones(size[0], device=DEVICE).bfloat16()
    for rank in ranks:
        layers = layers_of(kind, size, "nvfp4")
        weights = [dequantize(layer.packed, torch.float32) for layer in layers.children()]
        product = W4Linear(list(with_lora(layers, rank).children()), interleaved=kind == "gate_up")
        width, options = product.out_features // (2 if kind == "gate_up" else 1), {"silu": kind == "gate_up"}
        for rows in (1, 3, 8):
            x = torch.randn(rows, size[0], device=DEVICE).bfloat16()
            outs = []
            for given in (True, False, True, True, False, False, True):
                ahead = product.shrinks_ahead(rows)
                normed = rms_norm(x, weight, None, 1e-6, ahead)
                out = x.new_full((rows, width), float("nan"))
                product(normed, out, **options, ahead=ahead if given else None)
                outs.append((given, out))
            exact = reference(layers, weights, normed, kind, None)
            for given, out in outs:
                assert close(out, exact, TOLERANCE), (rank, rows, given)
                assert torch.equal(out, next(first for same, first in outs if same == given)), "not deterministic"


def test_a_product_reads_the_a_x_that_it_is_given():
    from qerl.kernels.linear import W4Linear

    product = W4Linear(list(with_lora(layers_of("o", SMALL, "nvfp4"), 16).children()))
    x = torch.randn(3, SMALL[0], device=DEVICE).bfloat16()
    ahead = product.shrinks_ahead(len(x))
    outs = []
    for factor in (0, 1, 2):
        ahead.out.fill_(factor)
        outs.append(x.new_full(x.shape, float("nan")))
        product(x, outs[-1], ahead=ahead)
    zero, one, two = (out.double() for out in outs)
    assert close(two - zero, 2 * (one - zero), TOLERANCE)
    assert (one - zero).norm() > 0.1 * zero.norm()


def test_a_x_of_another_product_and_of_many_rows():
    from qerl.kernels import linear

    first, second = (linear.W4Linear(list(with_lora(layers_of("o", SMALL, "nvfp4"), r).children())) for r in (16, 32))
    x = torch.zeros(2, SMALL[0], device=DEVICE).bfloat16()
    with pytest.raises(ValueError, match="shrinks_ahead"):
        first(x, torch.empty_like(x), ahead=second.shrinks_ahead(2))
    assert first.shrinks_ahead(linear._AHEAD_ROWS) is not None
    assert first.shrinks_ahead(linear._AHEAD_ROWS + 1) is None
    assert linear.W4Linear(list(layers_of("o", SMALL, "nvfp4").children())).shrinks_ahead(1) is None
