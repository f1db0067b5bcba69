"""The portable products: where they are used, and their division among programs (numbers: `test_interpreter.py`)."""

import inspect

import pytest
import torch

from qerl.models.linear import product_class

pytest.importorskip("triton")

from qerl.kernels import reference, triton
from qerl.kernels.triton.linear import tiles

HOPPER, OTHERS = (9, 0), ((8, 0), (8, 6), (8, 9), (10, 0), (12, 0), (12, 1))
SHAPES = [(3584, 3584), (512, 3584), (512, 3584)]


@pytest.mark.parametrize(
    ("capabilities", "weights", "shapes", "dtype", "kernels", "product"),
    [
        ((HOPPER,), "nvfp4", SHAPES, torch.bfloat16, "auto", "W4Linear"),
        ((HOPPER,), "mxfp4", SHAPES, torch.bfloat16, "auto", "W4Linear"),
        ((HOPPER,), "mxfp4", SHAPES, torch.bfloat16, "portable", "PortableLinear"),
        (OTHERS, "nvfp4", SHAPES, torch.bfloat16, "auto", "PortableLinear"),
        (OTHERS, "mxfp4", SHAPES, torch.bfloat16, "auto", "PortableLinear"),
        (OTHERS, "nvfp4", [(64, 896 + 64)], torch.bfloat16, "auto", "TorchLinear"),
        (OTHERS, "nvfp4", SHAPES, torch.float16, "auto", "TorchLinear"),
        (OTHERS, "nf4", SHAPES, torch.bfloat16, "auto", "BitsandbytesLinear"),
        ((None,), "nvfp4", SHAPES, torch.bfloat16, "portable", "TorchLinear"),
    ],
)
def test_the_capability_chooses_the_product(capabilities, weights, shapes, dtype, kernels, product):
    for capability in capabilities:
        assert product_class(capability, weights, shapes, dtype, kernels).__name__ == product


@pytest.mark.parametrize("tile", tiles())
def test_splits_fill_the_gpu_and_leave_no_block_out(tile):
    for rows_of_w, blocks in ((4608, 28), (3584, 148), (37888, 28), (24, 1)):
        splits = tile.splits(tile.m, rows_of_w, blocks, 132)
        assert 1 <= splits <= blocks
        programs = splits * -(-rows_of_w // tile.n)
        assert splits == 1 or programs <= tile.programs * 132


def test_both_modules_of_operations_have_the_same_functions():
    for name in triton.__all__:
        assert inspect.signature(getattr(triton, name)) == inspect.signature(getattr(reference, name))
