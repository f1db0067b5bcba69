"""NF4 on a GPU by bitsandbytes' kernels: bits against plain PyTorch on the CPU, and products against float64."""

import pytest
import torch

from qerl.formats.codecs import Packed, dequantize, quantize
from qerl.models.linear import BitsandbytesLinear, PackedLinear, fuse

SHAPES = [(256, 256), (512, 256)]


def on_gpu(packed):
    return Packed(packed.weights_format, packed.shape, {name: tensor.cuda() for name, tensor in packed.tensors.items()})


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unpacked_as_on_a_cpu(dtype, nested):
    packed = quantize(torch.randn(384, 1024), "nf4", double_quant=nested)
    assert torch.equal(dequantize(on_gpu(packed), dtype).cpu(), dequantize(packed, dtype))


@pytest.mark.parametrize("rows", [1, 3, 8, 33, 256])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_products(rows, residual, nested):
    packed = [quantize(torch.randn(shape, device="cuda") * 0.02, "nf4", double_quant=nested) for shape in SHAPES]
    biases = [torch.randn(outputs, device="cuda", dtype=torch.bfloat16) for outputs, _ in SHAPES]
    linear = fuse([PackedLinear.from_packed(*pair) for pair in zip(packed, biases, strict=True)], torch.bfloat16)
    assert isinstance(linear, BitsandbytesLinear)
    x = torch.randn(rows, 256, device="cuda").bfloat16()
    before = torch.randn(rows, linear.out_features, device="cuda").bfloat16()
    out = before.clone() if residual else torch.full_like(before, float("nan"))
    linear(x, out, residual=residual)
    weights = torch.cat([dequantize(one, torch.float64) for one in packed])
    exact = x.double() @ weights.T + torch.cat(biases).double()
    exact = exact + before.double() if residual else exact
    assert (out.double() - exact).norm() <= 6e-3 * exact.norm()
