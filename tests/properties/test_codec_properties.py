"""Codecs: every finite weight becomes the nearest value of its group's grid, as in the libraries."""

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qerl.formats.codecs import PACKED_FORMATS, Packed, dequantize, quantize, read_nf4_state, tensor_specs
from qerl.settings.models import FORMATS, FormatError
from tests.parity.test_codec_parity import assert_bits_equal
from tests.properties.values import refused_in_one_sentence

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
LARGEST = 2.0**126


@st.composite
def weights(draw, smallest=0.0, largest=LARGEST, spread=60, dtypes=(torch.float32, torch.bfloat16)):
    """A weight [out, in] of any magnitude: few distinct numbers, each row at a scale of its own."""
    rows, groups = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["any", "scaled"]))
    if kind == "any":
        elements = st.floats(-largest, largest, width=32)
        values = draw(hnp.arrays(np.float32, (rows, 64 * groups), elements=elements, fill=elements))
    else:
        seed = draw(st.integers(0, 2**32 - 1))
        values = np.random.default_rng(seed).standard_normal((rows, 64 * groups)).astype(np.float32)
        exponents = draw(st.lists(st.integers(-spread, spread), min_size=rows, max_size=rows))
        values = np.ldexp(values, np.array(exponents)[:, None]).astype(np.float32)
        values[draw(st.integers(0, rows - 1)), ::3] = draw(st.sampled_from([0.0, -0.0, 1.0, values.flat[0]]))
    weight = torch.from_numpy(values).to(draw(st.sampled_from(dtypes)))
    nonzero = weight[weight != 0].abs()
    assume(weight.abs().max() <= largest and (not len(nonzero) or nonzero.min() >= smallest))
    return weight


def grid(packed):
    """The values that each weight of a group may take, float64 [out, groups, 1, codes]: worked out from the scales."""
    tensors = packed.tensors
    if packed.weights_format == "nf4":
        scale = tensors["weight_absmax"].double().view(packed.shape[0], -1)
        codes = tensors["weight_quant_map"].double()
    else:
        codes = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
        if packed.weights_format == "nvfp4":
            scale = tensors["weight_scale"].double() / tensors["weight_global_scale"].double()
        else:
            scale = torch.exp2(tensors["weight_scale"].double() - 127)
    return scale[..., None, None] * codes


@pytest.mark.parametrize("weights_format", PACKED_FORMATS)
@given(weight=weights())
@example(weight=torch.zeros(1, 64))
@example(weight=torch.full((2, 64), 2.0**126))
@example(weight=torch.full((1, 64), 1e-45))
@example(weight=torch.tensor([[6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 8]))
def test_every_weight_comes_back_as_the_nearest_value_of_its_groups_grid(weights_format, weight):
    packed = quantize(weight, weights_format, double_quant=False)
    dense = dequantize(packed, torch.float32)
    assert dense.isfinite().all()
    size = FORMATS[weights_format].group_size
    groups, back = (t.double().view(weight.shape[0], -1, size, 1) for t in (weight, dense))
    values = grid(packed)
    nearest = (groups - values).abs().amin(-1)
    error = (groups - back).abs()[..., 0]
    # Float32 rounds a value and a tie's middle; bitsandbytes' smallest absmax is 1e-38, below which all may be zero.
    slack = 1e-6 * values.abs().amax(-1) + (1e-38 if weights_format == "nf4" else 2e-45)
    assert (error <= nearest + slack).all()
    assert ((back == 0) | (back.sign() == groups.sign())).all()


@pytest.mark.parametrize("weights_format", PACKED_FORMATS)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 4))
def test_any_codes_are_unpacked_by_the_definition(weights_format, seed, rows):
    """Byte by byte, in exact arithmetic; also codes and scales that no quantization writes."""
    generator = np.random.default_rng(seed)
    shape = (rows, 64)
    tensors = {}
    for name, (of, dtype) in tensor_specs(weights_format, shape, nested=False).items():
        drawn = torch.from_numpy(generator.standard_normal(of).astype(np.float32)).abs() + 0.01
        integers = torch.from_numpy(generator.integers(60, 190, of, dtype=np.uint8))
        tensors[name] = integers if dtype == torch.uint8 else drawn.to(dtype)
    dense = dequantize(Packed(weights_format, shape, tensors), torch.float32).view(-1)
    values = grid(Packed(weights_format, shape, tensors))
    values = values.expand(rows, -1, FORMATS[weights_format].group_size, 16).reshape(-1, 16)
    high_first = weights_format == "nf4"
    for index, byte in enumerate(tensors["weight_packed"].view(-1).tolist()):
        nibbles = (byte >> 4, byte & 15) if high_first else (byte & 15, byte >> 4)
        for offset, nibble in enumerate(nibbles):
            assert dense[2 * index + offset].item() == pytest.approx(
                values[2 * index + offset, nibble].item(), rel=3e-7
            )


@pytest.mark.parametrize("weights_format", PACKED_FORMATS)
@given(at=st.tuples(st.integers(0, 1), st.integers(0, 63)), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=5)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 2.0**127])
def test_what_is_no_number_of_the_formats_is_refused(weights_format, number, at, dtype):
    weight = torch.ones(2, 64, dtype=dtype)
    weight[at] = number
    with pytest.raises(FormatError, match="NaN or magnitudes"):
        quantize(weight, weights_format)


@given(
    weights_format=st.sampled_from([*PACKED_FORMATS, "int4", ""]),
    shape=st.lists(st.integers(0, 130), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int8]),
)
@example(weights_format="nvfp4", shape=[0, 64], dtype=torch.float32)
@example(weights_format="nf4", shape=[3, 0], dtype=torch.float32)
@settings(max_examples=200)
def test_any_shape_is_quantized_or_refused_in_one_sentence(weights_format, shape, dtype):
    fits = weights_format in FORMATS and len(shape) == 2 and dtype in (torch.float32, torch.bfloat16)
    fits = fits and shape[0] > 0 and shape[1] > 0 and shape[1] % FORMATS[weights_format].group_size == 0
    with refused_in_one_sentence():
        packed = quantize(torch.ones(shape, dtype=dtype), weights_format)
        assert fits
        assert dequantize(packed, torch.float32).shape == torch.Size(shape)
        return
    assert not fits


@pytest.mark.parametrize("weights_format", PACKED_FORMATS)
def test_a_weight_with_other_strides_is_the_same_weight(weights_format):
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    expected = quantize(weight, weights_format)
    for view in (weight.t().contiguous().t(), weight.repeat(1, 2)[:, :128]):
        assert_bits_equal(quantize(view, weights_format).tensors, expected.tensors)


@given(content=st.binary(max_size=60) | st.sampled_from([b"[]", b"{}", b"null", b'{"shape": [-1, 64]}', b"[" * 4000]))
@example(content=b"\xff")
@example(content=b'{"shape": [1, 64], "nested_offset": "x"}')
@example(content=b'{"quant_type": "nf4", "blocksize": 64, "shape": [1, true]}')
@example(content=b"9" * 4096)
@example(content=b" " * 10_000)
def test_any_metadata_of_nf4_is_read_or_one_sentence(content):
    with refused_in_one_sentence():
        (rows, columns), _ = read_nf4_state(torch.tensor(list(content), dtype=torch.uint8))
        assert rows > 0 < columns
