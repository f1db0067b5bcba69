"""The codecs against their definitions, computed here value by value in double precision."""

import math

import pytest
import torch

from qerl.formats.codecs import (
    PACKED_FORMATS,
    Packed,
    dequantize,
    from_checkpoint,
    nvfp4_global_scale,
    quantize,
    tensor_specs,
    to_checkpoint,
)
from qerl.formats.group_size import GROUP_SIZE, FormatError
from qerl.formats.nf4 import STATE_NAME
from tests.bits import bits_per_weight

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def random_weight(rows=48, columns=192, dtype=torch.float32, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def e2m1(nibble):
    return -E2M1[nibble & 7] if nibble & 8 else E2M1[nibble]


@pytest.mark.parametrize("weights_format", ["nvfp4", "mxfp4"])
def test_every_byte_decodes_by_the_definition(weights_format):
    rows, columns = 4, 256
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    codes.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    size = GROUP_SIZE[weights_format]
    if weights_format == "nvfp4":
        scale = (torch.rand(rows, columns // size, generator=generator) * 400).to(torch.float8_e4m3fn)
        tensors = {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": torch.tensor([37.5])}
        factor = scale.double() / 37.5
    else:
        scale = torch.randint(100, 150, (rows, columns // size), dtype=torch.uint8, generator=generator)
        tensors = {"weight_packed": codes, "weight_scale": scale}
        factor = torch.tensor([[2.0 ** (int(e) - 127) for e in row] for row in scale], dtype=torch.float64)
    dense = dequantize(Packed(weights_format, (rows, columns), tensors), torch.float32)
    for row in range(rows):
        for column in range(columns):
            byte = int(codes[row, column // 2])
            nibble = byte >> 4 if column % 2 else byte & 15
            expected = e2m1(nibble) * factor[row, column // size].item()
            assert dense[row, column].item() == pytest.approx(expected, rel=2e-7, abs=0)


def test_codes_are_the_nearest_values_and_ties_go_to_even():
    positive = [0.0, 0.2, 0.25, 0.26, 0.75, 1.25, 1.3, 1.75, 2.5, 2.6, 3.5, 5.0, 5.1, 6.0, 0.5, 4.0]
    expected = [0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.5, 2.0, 2.0, 3.0, 4.0, 4.0, 6.0, 6.0, 0.5, 4.0]
    weight = torch.tensor([positive, [-value for value in positive]])
    # A global scale of 1 and a largest weight of 6 make the group's scale 1, so that the weights are the scaled values.
    packed = quantize(weight, "nvfp4", global_scale=torch.ones(1))
    assert dequantize(packed, torch.float32).tolist() == [expected, [-value for value in expected]]


@pytest.mark.parametrize("weights_format", PACKED_FORMATS)
def test_quantizing_twice_changes_nothing(weights_format):
    weight = random_weight()
    once = quantize(weight, weights_format, double_quant=False)
    scale = once.tensors.get("weight_global_scale")
    dense = dequantize(once, torch.float32)
    twice = dequantize(quantize(dense, weights_format, global_scale=scale, double_quant=False), torch.float32)
    torch.testing.assert_close(twice, dense, rtol=1e-6, atol=0)


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("weights_format", PACKED_FORMATS)
def test_error_is_bounded_by_the_widest_gap_between_codes(weights_format, double_quant):
    weight = random_weight(64, 256)
    packed = quantize(weight, weights_format, double_quant=double_quant)
    groups = weight.view(64, -1, GROUP_SIZE[weights_format])
    error = (groups - dequantize(packed, torch.float32).view_as(groups)).abs()
    # Half the widest gap relative to the group's largest: 1 of 6, 2 of 6 clipped by a power of two, 0.152 of NF4's 1;
    # E4M3 rounds the scale by up to 1/16, the 8-bit absmax by about 2 %.
    bound = {"nvfp4": 1 / 6 + 1 / 16, "mxfp4": 1 / 4 + 1e-6, "nf4": 0.153 + 0.03 * double_quant}[weights_format]
    assert (error <= bound * groups.abs().amax(-1, keepdim=True)).all()
    relative = (error.square().sum() / weight.square().sum()).sqrt()
    assert relative < {"nvfp4": 0.11, "mxfp4": 0.13, "nf4": 0.10}[weights_format]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights_format", PACKED_FORMATS)
def test_zeros_stay_zeros(weights_format, dtype):
    for weight in (torch.zeros(4, 64, dtype=dtype), torch.full((4, 64), -0.0, dtype=dtype)):
        dense = dequantize(quantize(weight, weights_format), dtype)
        assert torch.equal(dense, torch.zeros_like(dense))


def test_shared_global_scale_covers_the_largest_weight():
    small, large = random_weight(seed=1), 50 * random_weight(seed=2)
    shared = nvfp4_global_scale(small, large)
    assert torch.equal(shared, nvfp4_global_scale(large))
    assert shared.item() == pytest.approx(448 * 6 / large.abs().max().item(), rel=1e-6)
    assert torch.equal(quantize(small, "nvfp4", global_scale=shared).tensors["weight_global_scale"], shared)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("weights_format", PACKED_FORMATS)
def test_tensors_have_the_promised_shapes(weights_format, nested):
    packed = quantize(random_weight(), weights_format, double_quant=nested)
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in packed.tensors.items()}
    assert found == tensor_specs(weights_format, (48, 192), nested)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("weights_format", PACKED_FORMATS)
def test_checkpoint_round_trip(weights_format, nested):
    packed = quantize(random_weight(), weights_format, double_quant=nested)
    stored = to_checkpoint(packed)
    read = from_checkpoint(weights_format, stored)
    assert read.shape == packed.shape
    assert read.tensors.keys() == packed.tensors.keys()
    assert all(
        torch.equal(read.tensors[name].view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in packed.tensors.items()
    )


def test_bits_per_weight():
    weight = random_weight(64, 256)
    count = weight.numel()
    assert bits_per_weight(quantize(weight, "mxfp4")) == 4.25
    assert bits_per_weight(quantize(weight, "nvfp4")) == 4.5 + 32 / count
    plain = bits_per_weight(quantize(weight, "nf4", double_quant=False))
    assert plain == pytest.approx(4.5 + 16 * 32 / count)
    blocks = count // 64
    nested = 4 + 8 / 64 + 32 * (math.ceil(blocks / 256) + 16 + 256 + 1) / count
    assert bits_per_weight(quantize(weight, "nf4")) == pytest.approx(nested)


@pytest.mark.parametrize("weights_format", PACKED_FORMATS)
def test_group_must_divide_the_input_dimension(weights_format):
    columns = GROUP_SIZE[weights_format] * 3 // 2
    with pytest.raises(FormatError, match=f"{weights_format}.*{GROUP_SIZE[weights_format]} weights.*{columns}"):
        quantize(torch.ones(64, columns), weights_format)


def test_unsupported_inputs_are_errors():
    with pytest.raises(FormatError, match="unknown weights format 'int4'"):
        quantize(torch.ones(2, 64), "int4")
    with pytest.raises(FormatError, match="float64"):
        quantize(torch.ones(2, 64, dtype=torch.float64), "nvfp4")
    with pytest.raises(FormatError, match="3 dimensions"):
        quantize(torch.ones(2, 2, 64), "nvfp4")
    stored = to_checkpoint(quantize(torch.ones(2, 64), "nf4"))
    text = bytes(stored[STATE_NAME].tolist()).replace(b'"blocksize": 64', b'"blocksize": 32')
    with pytest.raises(FormatError, match="blocksize=32"):
        from_checkpoint("nf4", {**stored, STATE_NAME: torch.tensor(list(text), dtype=torch.uint8)})
