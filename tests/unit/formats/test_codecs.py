"""The codecs against their definitions, computed here value by value in double precision."""

import math

import pytest
import torch

from qerl.formats.codecs import (
    PACKED_FORMATS,
    dequantize,
    from_checkpoint,
    nvfp4_global_scale,
    quantize,
    tensor_specs,
    to_checkpoint,
)
from qerl.formats.group_size import FormatError
from qerl.formats.nf4 import STATE_NAME
from tests.bits import bits_per_weight


def random_weight(rows=48, columns=192, dtype=torch.float32, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_codes_are_the_nearest_values_and_ties_go_to_even():
    positive = [0.0, 0.2, 0.25, 0.26, 0.75, 1.25, 1.3, 1.75, 2.5, 2.6, 3.5, 5.0, 5.1, 6.0, 0.5, 4.0]
    expected = [0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.5, 2.0, 2.0, 3.0, 4.0, 4.0, 6.0, 6.0, 0.5, 4.0]
    weight = torch.tensor([positive, [-value for value in positive]])
    # A global scale of 1 and a largest weight of 6 make the group's scale 1, so that the weights are the scaled values.
    packed = quantize(weight, "nvfp4", global_scale=torch.ones(1))
    assert dequantize(packed, torch.float32).tolist() == [expected, [-value for value in expected]]


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
