"""The packed products and the unpacking kernels against float64, on fresh random inputs and poisoned outputs.

Both classes of products run on Hopper; the portable one alone elsewhere.
"""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers.activations import ACT2FN

from qerl.formats.codecs import dequantize, nvfp4_global_scale, quantize
from qerl.kernels.cuda import jit
from qerl.kernels.cuda.w4a16 import compile_ahead, limits
from qerl.models.linear import POLICY_ADAPTER, PackedLinear, PortableLinear, W4Linear
from qerl.models.lora import register_lora
from qerl.settings.run import AdapterSettings
from tests.gpu.backends import HOPPER

DEVICE = torch.device("cuda")
#: Rows of x on both sides of every limit of a variant, more than one row block, and more than one launch.
ROWS = (1, 3, 31, 100, 300, 1100, 9000, *(rows for limit in limits(512) for rows in (limit, limit + 1)))
#: Triton compiles each variant and rank anew, so there are fewer of them.
PORTABLE_ROWS = (1, 9, 32, 33, 100, 129, 300)
MANY, FEW = (8, 16, 32, 64, 96, 128, 160, 192, 224, 320, 384, 512), (3, 9, 20, 40, 70, 98, 129, 161, 200, 300, 330, 450)
#: bfloat16 inputs are exact here; A x and the output are rounded to bfloat16.
TOLERANCE = 6e-3
SMALL, LARGE = (256, 128, 512), (3584, 512, 18944)
#: q, k and v have three blocks of rows together, of which a cluster of two has one and a half.
ODD = (256, 64, 512)
#: Gate and up as two layers, and as one, with an activation of each.
GATED = {"gate_up": "silu", "fused gate_up": "gelu_pytorch_tanh"}
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
BACKENDS = [pytest.param(W4Linear, marks=on_hopper, id="hopper"), pytest.param(PortableLinear, id="portable")]


def product_of(backend, layers, gated=False):
    layers = list(layers.children())
    return W4Linear(layers, interleaved=gated) if backend is W4Linear else PortableLinear(layers, torch.bfloat16)


def shapes_of(kind, size):
    hidden, narrow, wide = size
    return {
        "qkv": [(hidden, hidden), (narrow, hidden), (narrow, hidden)],
        "o": [(hidden, hidden)],
        "gate_up": [(wide, hidden), (wide, hidden)],
        "fused gate_up": [(2 * wide, hidden)],
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
    y = torch.cat(outputs, dim=1)
    if kind in GATED:
        gate, up = y.chunk(2, dim=1)
        return ACT2FN[GATED[kind]](gate) * up
    return y if before is None else y + before.double()


def rows_of(backend, size):
    if backend is PortableLinear:
        return PORTABLE_ROWS
    of_large = (1, 5, 16, 32, 33, 64, 80, 97, 128, 150, 161, 192, 200, 225, 256, 280, 384, 400, 512, 700)
    return of_large if size is LARGE else ROWS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["qkv", "o", *GATED, "down"])
@pytest.mark.parametrize("weights_format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(
    ("size", "ranks"),
    [(SMALL, (0, 16, 40, 128)), (ODD, (0, 16)), (LARGE, (0, 16, 64, 128))],
    ids=["small", "odd", "7b"],
)
def test_products_are_those_of_float64(kind, weights_format, size, ranks, backend):
    for rank in ranks if backend is W4Linear else ranks[-1:]:
        layers = layers_of(kind, size, weights_format)
        weights = [dequantize(layer.packed, torch.float32) for layer in layers.children()]
        if rank:
            with_lora(layers, rank)
        product = product_of(backend, layers, kind in GATED)
        for rows in rows_of(backend, size):
            x = torch.randn(rows, weights[0].shape[1], device=DEVICE).bfloat16()
            width = product.out_features // (2 if kind in GATED else 1)
            before = torch.randn(rows, width, device=DEVICE).bfloat16() if kind in ("o", "down") else None
            options = {"residual": before is not None, "activation": GATED.get(kind)}
            outs = []
            for _ in range(2):
                out = x.new_full((rows, width), float("nan")) if before is None else before.clone()
                product(x, out, **options)
                outs.append(out)
            exact = reference(layers, weights, x, kind, before)
            assert (outs[0].double() - exact).norm() <= TOLERANCE * exact.norm(), (rank, rows)
            assert torch.equal(*outs), "not deterministic"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["o", "down"], ids=["small layer", "large layer"])
@pytest.mark.parametrize(("many", "few"), [*zip(MANY, FEW, strict=True)])
def test_a_row_does_not_depend_on_the_others(many, few, kind, backend):
    """The engine's buckets need this within one variant of the kernel."""
    if backend is PortableLinear and many > 128:
        pytest.skip("A x is by cuBLAS, which may take another algorithm for another number of rows")
    product = product_of(backend, with_lora(layers_of(kind, LARGE, "nvfp4"), 16))
    x = torch.randn(many, LARGE[0] if kind == "o" else LARGE[2], device=DEVICE).bfloat16()
    outs = [x.new_zeros(len(part), LARGE[0]) for part in (x, x[:few])]
    product(x, outs[0])
    product(x[:few].contiguous(), outs[1])
    assert torch.equal(outs[0][:few], outs[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weights_format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("kind", ["qkv", "gate_up", "fused gate_up"])
def test_layers_keep_their_weights_bit_for_bit(kind, weights_format, backend):
    layers = layers_of(kind, SMALL, weights_format)
    expected = [dequantize(layer.packed, torch.bfloat16) for layer in layers.children()]
    product_of(backend, layers, kind in GATED)
    for layer, weight in zip(layers.children(), expected, strict=True):
        assert torch.equal(layer.dense_weight(torch.bfloat16), weight)
        assert torch.equal(dequantize(layer.packed, torch.bfloat16), weight)


@on_hopper
def test_few_and_many_rows_in_turn_leave_nothing_behind():
    """The launches share memory for sums; one variant's must not reach the next."""
    layers = with_lora(layers_of("qkv", SMALL, "nvfp4"), AdapterSettings().rank)
    weights = [dequantize(layer.base_layer.packed, torch.float32) for layer in layers.children()]
    product = W4Linear(list(layers.children()))
    for rows in (4, 65, 300, 16, 700, 128, 1, 150, 400, 200, 32, 64, 257, 220, 2):
        x = torch.randn(rows, SMALL[0], device=DEVICE).bfloat16()
        out = x.new_full((rows, product.out_features), float("nan"))
        product(x, out)
        exact = reference(layers, weights, x, "qkv", None)
        assert (out.double() - exact).norm() <= TOLERANCE * exact.norm(), rows


@on_hopper
def test_products_compiled_ahead_compile_nothing_at_their_launch(monkeypatch, tmp_path):
    monkeypatch.setattr(jit, "cache_folder", lambda name: tmp_path / name)
    product = W4Linear(list(with_lora(layers_of("o", SMALL, "nvfp4"), 16).children()))
    jit.load.cache_clear()
    compile_ahead([product.operands], 200)
    kept = {file.name for file in (tmp_path / "kernels").iterdir()}
    for rows in (1, 9, 33, 128, 160, 200):
        product(x := torch.randn(rows, SMALL[0], device=DEVICE).bfloat16(), torch.zeros_like(x))
    assert {file.name for file in (tmp_path / "kernels").iterdir()} == kept
