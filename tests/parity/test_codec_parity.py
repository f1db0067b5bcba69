"""Codecs against compressed-tensors and bitsandbytes, bit for bit."""

import bitsandbytes.functional as bnb
import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from qerl.formats.codecs import dequantize, from_checkpoint, quantize

LIBRARY = {
    "nvfp4": (NVFP4PackedCompressor, preset_name_to_scheme("NVFP4A16", ["Linear"])),
    "mxfp4": (MXFP4PackedCompressor, preset_name_to_scheme("MXFP4A16", ["Linear"])),
}
DTYPES = [torch.float32, torch.bfloat16]


def assert_bits_equal(found, expected):
    """Tensors, or mappings of them, are equal as bytes, so that signed zeros, infinities and NaNs compare exactly."""
    if isinstance(found, torch.Tensor):
        found, expected = {"tensor": found}, {"tensor": expected}
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        ours, theirs = (x.contiguous().flatten().view(torch.uint8) for x in (tensor, expected[name]))
        assert torch.equal(ours, theirs), name


def weights(dtype):
    """Random and adversarial matrices by name; all magnitudes keep their scales within the float32 range."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    ties = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).repeat(4, 8)
    outlier = 1e-3 * normal(8, 128)
    outlier[3, 7] = 1e3
    cases = {
        "square": normal(128, 128),
        "wide": normal(24, 320),
        "tall": normal(300, 64),
        "one row": normal(1, 64),
        "zeros": torch.zeros(4, 128),
        "negative zeros": torch.full((4, 128), -0.0),
        "zero groups": normal(16, 128) * (torch.arange(128) // 64),
        "one outlier": outlier,
        "constant": torch.ones(4, 128),
        "ties": torch.cat([ties, -ties], dim=1),
        "scaled ties": torch.cat([ties, -ties], dim=1) * torch.logspace(-3, 3, 4, base=2).unsqueeze(1),
        "powers of two": torch.logspace(-20, 20, 64, base=2).repeat(4, 2),
        "edges": torch.tensor([2688.0, -2688.0, 448.0, 6.0, -6.0, 0.5, 5.0, -5.0]).repeat(2, 16),
        "just past the edges": torch.tensor([2688.0, -2690.0, 449.0, 6.01, -6.01]).repeat(2, 128)[:, :128],
        "smallest normal": torch.full((2, 128), torch.finfo(dtype).tiny),
        "mixed magnitudes": normal(16, 192) * torch.logspace(-40, 30, 192),
        "heavy tails": normal(128, 512) ** 5,
    }
    cases |= {f"times {scale:g}": scale * normal(8, 128) for scale in (1e-45, 1e-40, 1e-38, 1e-36, 1e-20, 1e20, 1e30)}
    return {name: weight.to(dtype) for name, weight in cases.items()}


CASES = [(dtype, name) for dtype in DTYPES for name in weights(dtype)]
cases = pytest.mark.parametrize(("dtype", "name"), CASES, ids=[f"{str(d)[6:]}-{n}" for d, n in CASES])


def library_fp4(weight, weights_format):
    """The packed tensors and the bfloat16 weight of compressed-tensors."""
    compressor, scheme = LIBRARY[weights_format]
    groups = weight.view(weight.shape[0], -1, scheme.weights.group_size)
    low, high = groups.amin(-1), groups.amax(-1)
    state = {"weight": weight.clone()}
    if weights_format == "nvfp4":
        state["weight_global_scale"] = generate_gparam(low.min().reshape(1), high.max().reshape(1))
    scale, _ = calculate_qparams(low, high, scheme.weights, global_scale=state.get("weight_global_scale"))
    packed = compressor.compress({**state, "weight_scale": scale.to(weight.dtype)}, scheme)
    return packed, compressor.decompress(dict(packed), scheme)["weight"]


@cases
@pytest.mark.parametrize("weights_format", LIBRARY)
def test_fp4_equals_compressed_tensors(weights_format, dtype, name):
    weight = weights(dtype)[name]
    expected, dense = library_fp4(weight, weights_format)
    packed = quantize(weight, weights_format)
    assert_bits_equal(packed.tensors, expected)
    assert_bits_equal(dequantize(packed, torch.bfloat16), dense)
    # The float32 weight is the one that the library rounds to bfloat16.
    assert_bits_equal(dequantize(packed, torch.float32).bfloat16(), dense)


@cases
@pytest.mark.parametrize("nested", [False, True])
def test_nf4_is_unpacked_as_by_bitsandbytes(nested, dtype, name):
    weight = weights(dtype)[name]
    codes, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=nested)
    expected = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    read = from_checkpoint("nf4", {"weight": codes, **expected})
    for out_dtype in DTYPES:
        state.dtype = out_dtype
        dense = bnb.dequantize_4bit(codes, state)
        ours = dequantize(read, out_dtype)
        # bitsandbytes' CPU code flushes to zero what is subnormal before it is rounded to bfloat16.
        normal = (ours.abs() > torch.finfo(out_dtype).tiny) | (out_dtype == torch.float32)
        assert_bits_equal(ours[normal], dense[normal])
        assert ((dense[~normal] == 0) | (dense[~normal] == ours[~normal])).all()
