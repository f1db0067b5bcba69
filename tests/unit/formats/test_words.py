"""The layout of 4-bit weights for the portable kernels loses nothing; kernels' tests compare its decoding."""

import pytest
import torch

from qerl.formats import words as layout
from qerl.formats.codecs import quantize
from qerl.formats.group_size import FormatError


def random_packed(weights_format, *shapes):
    weights = [torch.randn(shape) * torch.rand(shape[0], 1) * 3 for shape in shapes]
    return [quantize(weight, weights_format) for weight in weights]


@pytest.mark.parametrize("weights_format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("shapes", [[(1, 128)], [(48, 384)], [(136, 256), (40, 256), (3, 256)], [(24, 96), (5, 96)]])
def test_unpacking_gives_back_every_bit_in_as_many_bytes(weights_format, shapes):
    packed = random_packed(weights_format, *shapes)
    if weights_format == "nvfp4":
        packed[0].tensors["weight_scale"].view(torch.uint8)[0, :6] = torch.arange(1, 7)  # subnormal ones too
    words = layout.pack(packed)
    for part, before in enumerate(packed):
        after = layout.unpack(words, part)
        for name, tensor in before.tensors.items():
            assert torch.equal(tensor.view(torch.uint8), after.tensors[name].view(torch.uint8)), name
    names = "weight_packed", "weight_scale"
    least = sum(one.tensors[name].nbytes for one in packed for name in names)
    assert words.data.nbytes * words.columns == least * 128 * words.blocks  # gpt-oss has a width of 22.5 blocks


def test_a_negative_scale_is_refused():
    [packed] = random_packed("nvfp4", (16, 256))
    packed.tensors["weight_scale"].view(torch.uint8)[3, 5] = 0x81
    with pytest.raises(FormatError, match="scale"):
        layout.pack([packed])
