"""The portable products: where they are used, and their division among programs (numbers: `test_interpreter.py`)."""

import pytest
import torch

from qerl.formats.codecs import quantize
from qerl.kernels.portable import tile_for, tiles
from qerl.models.linear import PackedLinear, PortableLinear, W4Linear, product_class

HOPPER, OTHERS = (9, 0), ((8, 0), (8, 6), (8, 9), (10, 0), (12, 0), (12, 1))
SHAPES = [(3584, 3584), (512, 3584), (512, 3584)]


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4"])
def test_the_capability_chooses_the_product(weights):
    assert product_class(HOPPER, weights, SHAPES, torch.bfloat16) is W4Linear
    assert product_class(HOPPER, weights, SHAPES, torch.bfloat16, "portable") is PortableLinear
    for capability in OTHERS:
        assert product_class(capability, weights, SHAPES, torch.bfloat16) is PortableLinear


def test_what_the_portable_products_lack_is_unpacked():
    for capability in OTHERS:
        assert product_class(capability, "nvfp4", [(64, 896 + 64)], torch.bfloat16).__name__ == "TorchLinear"
        assert product_class(capability, "nvfp4", SHAPES, torch.float16).__name__ == "TorchLinear"
        assert product_class(capability, "nf4", SHAPES, torch.bfloat16).__name__ == "BitsandbytesLinear"
    assert product_class(None, "nvfp4", SHAPES, torch.bfloat16, "portable").__name__ == "TorchLinear"


def test_layers_share_one_copy_and_keep_their_products():
    packed = [quantize(torch.randn(rows, 256), "nvfp4") for rows in (48, 24)]
    layers, x = [PackedLinear.from_packed(one) for one in packed], torch.randn(3, 256)
    before = [layer(x) for layer in layers]
    PortableLinear(layers, torch.float32)
    assert all(torch.equal(layer(x), y) for layer, y in zip(layers, before, strict=True))
    [address] = {buffer.data_ptr() for layer in layers for buffer in layer.buffers()}
    PortableLinear(layers, torch.float32)
    assert {buffer.data_ptr() for layer in layers for buffer in layer.buffers()} == {address}


@pytest.mark.parametrize("tile", tiles())
def test_splits_fill_the_gpu_and_leave_no_block_out(tile):
    for rows_of_w, blocks in ((4608, 28), (3584, 148), (37888, 28), (24, 1)):
        splits = tile.splits(tile.m, rows_of_w, blocks, 132)
        assert 1 <= splits <= blocks
        programs = splits * -(-rows_of_w // tile.n)
        assert splits == 1 or programs <= tile.programs * 132


def test_more_rows_never_take_a_smaller_tile():
    sizes = [tile_for(rows).m for rows in range(1, 400)]
    assert sizes == sorted(sizes)
    assert all(tile.m >= 8 for tile in tiles())
