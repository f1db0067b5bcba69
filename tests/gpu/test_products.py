"""The packed products and the unpacking kernels against float64, on fresh random inputs and poisoned outputs.

Both classes of products run on Hopper, and the portable one alone elsewhere.
"""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers.activations import ACT2FN

from qerl.formats.codecs import dequantize, nvfp4_global_scale, quantize
from qerl.formats.layouts import Words
from qerl.kernels.cuda import jit
from qerl.kernels.cuda.w4a16 import limits
from qerl.kernels.state import dry_run, workspace
from qerl.kernels.triton.linear import Tile, dense, multiply, tile_for
from qerl.models.linear import POLICY_ADAPTER, PackedLinear, PortableLinear, W4Linear
from qerl.models.lora import register_lora
from qerl.settings.run import AdapterSettings
from tests.conftest import NIGHTLY
from tests.gpu.backends import HOPPER
from tests.gpu.exact import DEVICE, DTYPES, INTERPRETED, assert_near

DTYPE = DTYPES[0]
#: bfloat16 inputs are exact here; A x and the output are rounded to bfloat16.
TOLERANCE = 1e-5 if INTERPRETED else 6e-3
FORMATS = "nvfp4", "mxfp4"
#: Rows of x on both sides of every limit of a variant, more than one row block, and more than one launch.
ROWS = (1, 3, 31, 100, 300, 1100, 9000, *(rows for limit in limits(512) for rows in (limit, limit + 1)))
LARGE_ROWS = (1, 5, 16, 32, 33, 64, 80, 97, 128, 150, 161, 192, 200, 225, 256, 280, 384, 400, 512, 700)
#: Triton compiles each variant and rank anew, so there are fewer of them.
PORTABLE_ROWS = (1, 9, 32, 33, 100, 129, 300)
INTERPRETED_ROWS = (1, 3, 8, 9, 17, 33, 65, 129)
SIZES = {
    "small": ((256, 128, 512), (0, 16, 40, 128)),
    # q, k and v have three blocks of rows together, of which a cluster of two has one and a half.
    "odd": ((256, 64, 512), (0, 16)),
    "7b": ((3584, 512, 18944), (0, 16, 64, 128)),
}
#: Gate and up as two layers, and as one, with an activation of each.
GATED = {"gate_up": "silu", "fused gate_up": "gelu_pytorch_tanh"}
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="tiles that are for no GPU")
BACKENDS = [pytest.param(W4Linear, marks=on_hopper, id="hopper"), pytest.param(PortableLinear, id="portable")]
backends = pytest.mark.parametrize("backend", BACKENDS[1:] if INTERPRETED else BACKENDS)


def shapes_of(kind, size):
    if size == "interpreted":
        some = {"qkv": [(72, 384), (24, 384), (19, 384)], "o": [(80, 256)], "gate_up": [(136, 256)] * 2}
        return some.get(kind, [(272, 256)])
    (hidden, narrow, wide), _ = SIZES[size]
    return {
        "qkv": [(hidden, hidden), (narrow, hidden), (narrow, hidden)],
        "o": [(hidden, hidden)],
        "gate_up": [(wide, hidden), (wide, hidden)],
        "fused gate_up": [(2 * wide, hidden)],
        "down": [(hidden, wide)],
    }[kind]


def layers_of(kind, size, weights_format, rank=0):
    return random_layers(shapes_of(kind, size), weights_format, kind == "qkv", rank)


def random_layers(shapes, weights_format, biased, rank):
    """Layers of these shapes. In the interpreter the third has its own scale and rank, and the second no adapter."""
    weights = [torch.randn(shape, device=DEVICE) * 0.02 for shape in shapes]
    scale = nvfp4_global_scale(*weights[: 2 if INTERPRETED else None]) if weights_format == "nvfp4" else None
    model = nn.Module()
    # PEFT reads the device from a model's first parameter; packed layers have buffers alone.
    model.register_parameter("anchor", nn.Parameter(torch.zeros(1, device=DEVICE)))
    for i, weight in enumerate(weights):
        packed = quantize(weight, weights_format, global_scale=None if INTERPRETED and i > 1 else scale)
        bias = torch.randn(len(weight), device=DEVICE) if biased else None
        model.add_module(f"part{i}", PackedLinear.from_packed(packed, bias))
    if rank:
        uneven = {"rank_pattern": {"part2": 2}} if INTERPRETED else {}
        names = [f"part{i}" for i in range(len(weights)) if i != 1 or not INTERPRETED]
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, **uneven)
        register_lora(config)
        inject_adapter_in_model(config, model, adapter_name=POLICY_ADAPTER)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.5)
        if "lora_A" in name:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return list(model.children())


def product_of(backend, layers, gated=False):
    return W4Linear(layers, interleaved=gated) if backend is W4Linear else PortableLinear(layers, DTYPE)


def exact(layers, weights, x, kind, before=None):
    """Float64; A, B and A x in the dtype of x, as the product has them."""
    outputs = []
    for layer, weight in zip(layers, weights, strict=True):
        base = getattr(layer, "base_layer", layer)
        y = x.double() @ weight.double().T
        if base.bias is not None:
            y = y + base.bias.double()
        if base is not layer:
            a, b = (part["default"].weight.to(DTYPE).double() for part in (layer.lora_A, layer.lora_B))
            y = y + (x.double() @ a.T * layer.scaling["default"]).to(DTYPE).double() @ b.T
        outputs.append(y)
    y = torch.cat(outputs, dim=1)
    if kind in GATED:
        gate, up = y.chunk(2, dim=1)
        return ACT2FN[GATED[kind]](gate) * up
    return y if before is None else y + before.double()


def weights_of(layers):
    return [dequantize(getattr(layer, "base_layer", layer).packed, torch.float32) for layer in layers]


@backends
@pytest.mark.parametrize("kind", ["qkv", "o", *GATED, *([] if INTERPRETED else ["down"])])
@pytest.mark.parametrize("weights_format", FORMATS)
@pytest.mark.parametrize("size", ["interpreted"] if INTERPRETED else SIZES)
@torch.no_grad()
def test_products_are_those_of_float64(kind, weights_format, size, backend):
    ranks, rows_of_x = (0, 4 if weights_format == "nvfp4" else 70), INTERPRETED_ROWS
    if INTERPRETED:
        rows_of_x = rows_of_x if NIGHTLY or (kind, weights_format) == ("qkv", "nvfp4") else rows_of_x[::4]
    elif backend is W4Linear:
        ranks, rows_of_x = SIZES[size][1], LARGE_ROWS if size == "7b" else ROWS
    else:
        ranks, rows_of_x = SIZES[size][1][-1:], PORTABLE_ROWS
    for rank in ranks:
        layers = layers_of(kind, size, weights_format, rank)
        weights = weights_of(layers)
        product = product_of(backend, layers, kind in GATED)
        for rows in rows_of_x:
            x = torch.randn(rows, weights[0].shape[1], device=DEVICE).to(DTYPE)
            width = product.out_features // (2 if kind in GATED else 1)
            before = torch.randn(rows, width, device=DEVICE).to(DTYPE) if kind in ("o", "down") else None
            outs = []
            # The interpreter runs programs in one order: a second run can differ by what the first has left, if at all.
            for _ in range(1 if INTERPRETED and rows > 1 else 2):
                out = x.new_full((rows, width), float("nan")) if before is None else before.clone()
                product(x, out, residual=before is not None, activation=GATED.get(kind))
                outs.append(out)
            assert_near(outs[0], exact(layers, weights, x, kind, before), TOLERANCE)
            assert torch.equal(outs[0], outs[-1]), "not deterministic"


#: Numbers of rows, each with a smaller one of the same variant of the kernel.
PAIRS = [(8, 3), (16, 9), (32, 20), (64, 40), (96, 70), (128, 98), (160, 129), (192, 161), (224, 200), (320, 300)]
PAIRS = [(8, 3), (32, 20), (128, 70)] if INTERPRETED else [*PAIRS, (384, 330), (512, 450)]


@backends
@pytest.mark.parametrize("kind", ["o"] if INTERPRETED else ["o", "down"])
@pytest.mark.parametrize(("many", "few"), PAIRS)
@torch.no_grad()
def test_a_row_does_not_depend_on_the_others(many, few, kind, backend):
    """The engine's buckets need this within one variant of the kernel."""
    if backend is PortableLinear:
        if many > 128:
            pytest.skip("A x is by cuBLAS, which may take another algorithm for another number of rows")
        assert not INTERPRETED or tile_for(many) == tile_for(few)
    layers = layers_of(kind, "interpreted" if INTERPRETED else "7b", "nvfp4", 16)
    x, product = torch.randn(many, layers[0].in_features, device=DEVICE).to(DTYPE), product_of(backend, layers)
    outs = [x.new_zeros(len(part), product.out_features) for part in (x, x[:few])]
    product(x, outs[0])
    product(x[:few].contiguous(), outs[1])
    assert torch.equal(outs[0][:few], outs[1])


@backends
@pytest.mark.parametrize("weights_format", FORMATS)
@pytest.mark.parametrize("kind", ["qkv", "gate_up", "fused gate_up"])
def test_layers_keep_their_weights_bit_for_bit(kind, weights_format, backend):
    layers = layers_of(kind, "interpreted" if INTERPRETED else "small", weights_format)
    expected = [dequantize(layer.packed, DTYPE) for layer in layers]
    product_of(backend, layers, kind in GATED)
    for layer, weight in zip(layers, expected, strict=True):
        assert torch.equal(layer.dense_weight(DTYPE), weight)
        assert torch.equal(dequantize(layer.packed, DTYPE), weight)


@pytest.mark.parametrize("weights_format", FORMATS)
@pytest.mark.parametrize("columns", [256, 160])
def test_unpacked_weights_are_the_codecs_bit_for_bit(weights_format, columns):
    packed = [quantize(torch.randn(rows, columns, device=DEVICE) * 3, weights_format) for rows in (40, 19)]
    if weights_format == "nvfp4":
        packed[0].tensors["weight_scale"].view(torch.uint8)[0, :8] = torch.arange(1, 9)  # subnormal ones too
    words = Words.pack(packed)
    for part, before in enumerate(packed):
        assert torch.equal(dense(words, part, torch.float32), dequantize(before, torch.float32))


@torch.no_grad()
def test_changed_adapters_and_biases_take_effect_at_sync():
    layers = layers_of("qkv", "interpreted" if INTERPRETED else "small", "nvfp4", rank=16)
    product, x = PortableLinear(layers, DTYPE), torch.randn(3, layers[0].in_features, device=DEVICE).to(DTYPE)
    weights, out = weights_of(layers), x.new_empty(3, product.out_features)
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if "lora" in name or "bias" in name:
                parameter.add_(0.5)
    product.sync()
    product(x, out)
    assert_near(out, exact(layers, weights, x, "qkv"), TOLERANCE)


@in_interpreter
@torch.no_grad()
def test_every_division_of_the_columns_gives_the_product():
    packed = quantize(torch.randn(40, 1152) * 0.02, "nvfp4")
    product, x = PortableLinear([PackedLinear.from_packed(packed, None)], torch.float32), torch.randn(5, 1152)
    expected = x.double() @ dequantize(packed, torch.float32).double().T
    for programs in (1, 2, 3, 4, 9) if NIGHTLY else (1, 4, 9):
        out = torch.full((5, 40), torch.nan)
        multiply(product.operands, x, out, tile=Tile(16, 8, 4, 2, programs=programs))
        assert_near(out, expected, TOLERANCE)
        assert not workspace(x.device).get("arrivals", 1).any()  # the next launch counts from 0


@on_hopper
def test_few_and_many_rows_in_turn_leave_nothing_behind():
    """The launches share memory for sums; one variant's must not reach the next."""
    layers = layers_of("qkv", "small", "nvfp4", AdapterSettings().rank)
    weights, product = weights_of(layers), W4Linear(layers)
    for rows in (4, 65, 300, 16, 700, 128, 1, 150, 400, 200, 32, 64, 257, 220, 2):
        x = torch.randn(rows, 256, device=DEVICE).bfloat16()
        out = x.new_full((rows, product.out_features), float("nan"))
        product(x, out)
        assert_near(out, exact(layers, weights, x, "qkv"), TOLERANCE)


@on_hopper
def test_products_of_a_dry_run_compile_nothing_at_their_launch(monkeypatch, tmp_path):
    monkeypatch.setattr(jit, "cache_folder", lambda name: tmp_path / name)
    product = W4Linear(layers_of("o", "small", "nvfp4", 16))
    jit.load.cache_clear()
    with dry_run(DEVICE):
        for rows in limits(200):
            product(torch.randn(rows, 256, device=DEVICE).bfloat16(), out := torch.zeros(rows, 256).cuda().bfloat16())
            assert not out.any()
    kept = {file.name for file in (tmp_path / "kernels").iterdir()}
    for rows in (1, 9, 33, 128, 160, 200):
        product(x := torch.randn(rows, 256, device=DEVICE).bfloat16(), torch.zeros_like(x))
    assert kept
    assert {file.name for file in (tmp_path / "kernels").iterdir()} == kept
