"""The layouts of 4-bit weights for the GPU's kernels lose nothing, and codes lie where the kernels read them.

Decoding of `Words` is compared by the kernels' tests.
"""

import pytest
import torch

from qerl.formats.codecs import dequantize, joined, quantize, split_rows
from qerl.formats.layouts import KERNEL_FORMATS, Tiles, Words
from qerl.models.linear import PackedLinear, PortableLinear
from qerl.settings.models import FormatError

#: What the kernels take for codes' bits: sign, exponent and mantissa of a bfloat16, in both halves of a word.
MASK = 0x81C081C0


def random_packed(weights_format, *shapes):
    weights = [torch.randn(shape) * torch.rand(shape[0], 1) * 3 for shape in shapes]
    return [quantize(weight, weights_format) for weight in weights]


def as_bfloat16(bits):
    return bits.to(torch.int16).view(torch.bfloat16)


def assert_same_bits(found, expected):
    for name, tensor in expected.tensors.items():
        assert torch.equal(tensor.view(torch.uint8), found.tensors[name].view(torch.uint8)), name


@pytest.mark.parametrize("weights_format", KERNEL_FORMATS)
@pytest.mark.parametrize(
    ("layout", "shapes", "options"),
    [
        (Tiles, [(128, 256)], {}),
        (Tiles, [(48, 256)], {}),
        (Tiles, [(256, 512), (128, 512), (128, 512)], {}),
        (Tiles, [(4352, 256), (4352, 256)], {"interleaved": True}),
        (Tiles, [(144, 256), (144, 256)], {"interleaved": True}),
        *((Words, shapes, {}) for shapes in ([(1, 128)], [(48, 384)], [(136, 256), (40, 256), (3, 256)])),
        (Words, [(24, 96), (5, 96)], {}),
    ],
)
def test_unpacking_gives_back_every_bit(weights_format, layout, shapes, options):
    packed = random_packed(weights_format, *shapes)
    if weights_format == "nvfp4":
        packed[0].tensors["weight_scale"].view(torch.uint8)[0, :6] = torch.arange(1, 7)  # subnormal ones too
    made = layout.pack(packed, **options)
    for part, before in enumerate(packed):
        assert_same_bits(made.unpack(part), before)
    if layout is Words:  # in as many bytes; gpt-oss has a width of 22.5 blocks
        least = sum(one.tensors[name].nbytes for one in packed for name in ("weight_packed", "weight_scale"))
        assert made.data.nbytes * made.columns == least * 128 * made.blocks


@pytest.mark.parametrize("weights_format", KERNEL_FORMATS)
def test_a_tile_decodes_as_the_kernels_do(weights_format):
    """Row 8h + g, column 16j + 8q + 2t + e: lane 4g + t, word j, place h + 2q, half e."""
    [packed] = random_packed(weights_format, (16, 256))
    made = Tiles.pack([packed])
    multiplier, offset = made.scale_decode
    decoded = torch.zeros(16, 256, dtype=torch.float64)
    for block in range(2):
        tile = made.data[0, block, 0]
        words = tile[:1024].view(torch.int32).view(2, 8, 4, 4).long() & 0xFFFFFFFF
        scales = tile[1024:].view(8, 2, 8).long() * multiplier + (offset & 0xFFFF)
        for half, g, t, j in torch.cartesian_prod(*map(torch.arange, (2, 8, 4, 4))).tolist():
            word = int(words[half, g, t, j])
            fourth = (word << 6 & 0x80C080C0) | (word >> 2 & 0x01000100)
            rotated = word >> 6 | word << 26
            for place, pair in enumerate((word & MASK, rotated & MASK, word << 4 & MASK, fourth)):
                h, q = place % 2, place // 2
                for e in range(2):
                    code = as_bfloat16(torch.tensor(pair >> 16 * e & 0xFFFF)).double() * 2.0**126
                    scale = as_bfloat16(scales[g, h, 4 * half + j]).double()
                    decoded[8 * h + g, 128 * block + 64 * half + 16 * j + 8 * q + 2 * t + e] = code * scale * 2.0**-126
    weight = decoded * made.factors[0]
    assert (weight - dequantize(packed, torch.float64)).abs().max() <= 1e-6 * weight.abs().max()


def test_a_zero_scale_makes_its_weights_zero():
    [packed] = random_packed("nvfp4", (16, 256))
    packed.tensors["weight_scale"].view(torch.uint8)[3, 5] = 0
    weight = dequantize(Tiles.pack([packed]).unpack(0), torch.float32)
    assert torch.equal(weight, dequantize(packed, torch.float32))


@pytest.mark.parametrize("layout", [Tiles, Words])
def test_a_negative_scale_is_refused(layout):
    [packed] = random_packed("nvfp4", (16, 256))
    packed.tensors["weight_scale"].view(torch.uint8)[3, 5] = 0x81
    with pytest.raises(FormatError, match="scale"):
        layout.pack([packed])


@pytest.mark.parametrize("weights_format", KERNEL_FORMATS)
def test_a_fused_layer_has_its_halves_interleaved_and_keeps_its_products(weights_format):
    """Gate and up of Phi-3 are one layer; the kernel reads them as it reads two."""
    two = random_packed(weights_format, (24, 256), (24, 256))
    if weights_format == "nvfp4":  # a layer has one global scale
        two[1].tensors["weight_global_scale"] = two[0].tensors["weight_global_scale"]
    layer = PackedLinear.from_packed(joined(two))
    x = torch.randn(3, 256)
    before, weight = layer(x), layer.packed
    made = Tiles.pack(split_rows(weight, 24), interleaved=True)
    assert torch.equal(made.data, Tiles.pack(two, interleaved=True).data)
    layer.use_tiles(made, 0, 1)
    assert torch.equal(layer(x), before)
    assert_same_bits(layer.packed, weight)


@pytest.mark.parametrize(("weights_format", "rows"), [("nvfp4", 20), ("nf4", 24)])
def test_a_weight_that_has_no_such_parts_is_refused(weights_format, rows):
    with pytest.raises(FormatError, match=f"can't split 48 rows of {weights_format} into parts of {rows}"):
        split_rows(quantize(torch.randn(48, 256), weights_format), rows)


@pytest.mark.parametrize("portable", [True, False])
def test_a_layer_keeps_one_copy_and_its_products(portable):
    packed = random_packed("nvfp4", (32, 256), (16, 256))
    layers = [PackedLinear.from_packed(one) for one in packed]
    x = torch.randn(3, 256)
    before = [layer(x) for layer in layers]
    for _ in range(2):  # the second product finds the copy of the first
        if portable:
            PortableLinear(layers, torch.float32)
        else:
            made = Tiles.pack([layer.packed for layer in layers])
            for part, layer in enumerate(layers):
                layer.use_tiles(made, part)
        assert all(torch.equal(layer(x), y) for layer, y in zip(layers, before, strict=True))
        assert len({buffer.data_ptr() for layer in layers for buffer in layer.buffers()}) == 1
