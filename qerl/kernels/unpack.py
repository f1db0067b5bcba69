"""Kernels that unpack tiles or words to bfloat16 weights, for cuBLAS products in training."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from qerl.formats import tiles as layout
from qerl.formats.tiles import Tiles
from qerl.formats.words import Words
from qerl.kernels.jit import address, launch, load, params_struct

_SOURCE = Path(__file__).with_name("unpack.cu")
_Params = params_struct(
    weights=ctypes.c_void_p,
    out=ctypes.c_void_p,
    divisor=ctypes.c_float,
    **dict.fromkeys(
        (
            "first_tile",
            "tiles",
            "column_blocks",
            "interleaved",
            "scale_multiplier",
            "scale_offset",
        ),
        ctypes.c_int,
    ),
)


def dense(tiles: Tiles | Words, part: int) -> Tensor:
    """The weight of a layer, bfloat16 [rows, columns], bit for bit equal to that of `formats.dequantize`."""
    if isinstance(tiles, Words):
        from qerl.kernels.portable.decoding import dense as dense_of_words

        return dense_of_words(tiles, part, torch.bfloat16)
    out = tiles.data.new_empty(tiles.parts[part], tiles.columns, dtype=torch.bfloat16)
    multiplier, offset = tiles.scale_decode
    row_tiles = (tiles.rows if tiles.interleaved else tiles.parts[part]) // 16
    column_blocks = tiles.columns // layout.BLOCK_COLUMNS
    params = _Params(
        weights=address(tiles.data),
        out=address(out),
        divisor=tiles.divisors[part],
        first_tile=0 if tiles.interleaved else sum(tiles.parts[:part]) // 16,
        tiles=row_tiles,
        column_blocks=column_blocks,
        interleaved=part if tiles.interleaved else -1,
        scale_multiplier=multiplier,
        scale_offset=offset & 0xFFFF,
    )
    launch(load((_SOURCE,), "unpack", (), 0, out.get_device()), -(-row_tiles * column_blocks // 8), 256, 0, params)
    return out
