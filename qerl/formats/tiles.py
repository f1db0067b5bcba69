"""The tile layout of NVFP4 and MXFP4 weights for the GPU's kernels: the same codes and scales in another order.

A weight [rows, columns] is cut into blocks of 128 rows and 128 columns, stored row by row. A block has 8 tiles of 16
rows. A tile has 1,024 bytes of codes and then 128 of scales:

* codes: [half of the columns][lane][4] words of 32 bits. A word holds the eight codes that a lane of a warp needs as
  its part of a 16 x 16 operand of the tensor cores. Three in four codes reach their place in a pair of bfloat16 by at
  most one rotation and one mask, the fourth by two. (No placement needs one for each: 4 rotations of the places 15, 8,
  7 and 6 don't cover 16 bits.)
* scales: [8 rows][row r, row r + 8][8 groups of 16 columns] bytes. A byte b stands for the bfloat16 with the bits
  b * multiplier + offset.

NVFP4's E4M3 scales are always positive and become "E5M3". Subnormal ones are normalised, so that a shift and an
addition decode all. MXFP4's E8M0 scales are each stored twice and keep 245 binades below the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from qerl.formats.codecs import Packed
from qerl.settings.formats import FormatError

#: Formats that have kernels of their own.
KERNEL_FORMATS = ("nvfp4", "mxfp4")
BLOCK_ROWS, BLOCK_COLUMNS = 128, 128
_TILE_ROWS = 16
_CODE_BYTES = _TILE_ROWS * BLOCK_COLUMNS // 2
_SCALE_BYTES = BLOCK_COLUMNS
BLOCK_BYTES = BLOCK_ROWS // _TILE_ROWS * (_CODE_BYTES + _SCALE_BYTES)
#: Bits of a bfloat16 scale are byte * multiplier + offset. Scales come out times 2^118, of which a code's place takes
#: 2^-126 away: products are 2^-LEFT of the weight's.
NVFP4_DECODE = (1 << 4, (236 << 7) * 0x10001)
MXFP4_DECODE = (1 << 7, 0)
LEFT = 8
_MX_TOP = 245
#: For four codes of a word, the bit positions of the sign and of the magnitude from high to low; the other four codes'
#: positions are higher by 16, modulo 32.
_PLACES = ((15, 8, 7, 6), (21, 14, 13, 12), (11, 4, 3, 2), (9, 10, 1, 0))
#: Rows that are packed at a time, which bounds the memory for packing.
_ROWS_AT_A_TIME = 4096


@dataclass(frozen=True)
class KernelWeights:
    """Weights of layers with the same input, concatenated, in a layout of kernels."""

    data: Tensor  # uint8
    weights_format: str
    parts: tuple[int, ...]  # rows of each layer
    columns: int
    factors: tuple[float, ...]  # of each layer: weight = factor * code * (decoded scale)
    global_scales: tuple[Tensor | None, ...]
    largest_exponents: tuple[int, ...]  # MXFP4: of each layer's scales

    @property
    def rows(self) -> int:
        """Rows of all layers together."""
        return sum(self.parts)

    @property
    def scale_decode(self) -> tuple[int, int]:
        """Multiplier and offset of scale bytes."""
        return NVFP4_DECODE if self.weights_format == "nvfp4" else MXFP4_DECODE

    @property
    def divisors(self) -> tuple[float, ...]:
        """The divisor of each layer: weight = code * (scale / divisor)."""
        return tuple(2.0**LEFT / factor for factor in self.factors)

    def as_packed(self, part: int, codes: Tensor, scales: Tensor) -> Packed:
        """A layer's weight, of codes [rows, columns / 2] and scale bytes [rows, columns / 16] as `codes_and_scales`."""
        if self.weights_format == "mxfp4":
            exponents = scales[:, ::2].int() + self.largest_exponents[part] - _MX_TOP
            tensors = {"weight_scale": exponents.clamp(min=0).to(torch.uint8)}
        else:
            global_scale = self.global_scales[part]
            assert global_scale is not None
            stored = _e5m3(scales.device)[1][scales.long()].view(torch.float8_e4m3fn)
            tensors = {"weight_scale": stored, "weight_global_scale": global_scale}
        return Packed(self.weights_format, (self.parts[part], self.columns), {"weight_packed": codes, **tensors})


@dataclass(frozen=True)
class Tiles(KernelWeights):
    """`data` is [blocks of rows, blocks of columns, 8, 1152]; two layers may be `interleaved` by 8 rows."""

    interleaved: bool = False


def fits(weights_format: str, shapes: Sequence[tuple[int, int]]) -> bool:
    """Whether layers of these shapes [rows, columns] can be stored as tiles."""
    divides = all(rows % _TILE_ROWS == 0 and columns % (2 * BLOCK_COLUMNS) == 0 for rows, columns in shapes)
    return weights_format in KERNEL_FORMATS and divides


def pack(layers: Sequence[Packed], interleaved: bool = False) -> Tiles:
    """Store the weights of `layers` as tiles on their device. Raises `FormatError` unless scales are positive
    numbers.
    """
    codes, scales, factors, largest = zip(*map(codes_and_scales, layers), strict=True)
    join = _interleave if interleaved else torch.cat
    return Tiles(
        data=_to_blocks(join(codes), join(scales)),
        weights_format=layers[0].weights_format,
        parts=tuple(layer.shape[0] for layer in layers),
        columns=layers[0].shape[1],
        factors=factors,
        global_scales=tuple(layer.tensors.get("weight_global_scale") for layer in layers),
        largest_exponents=largest,
        interleaved=interleaved,
    )


def unpack(tiles: Tiles, part: int) -> Packed:
    """The weight of a layer as `pack` received it, except that a group with scale zero has codes of zero."""
    codes, scales = _from_blocks(tiles.data)
    if tiles.interleaved:
        codes, scales = (t[: tiles.rows].view(-1, 2, 8, t.shape[1])[:, part].flatten(0, 1) for t in (codes, scales))
    else:
        start = sum(tiles.parts[:part])
        codes, scales = (t[start : start + tiles.parts[part]] for t in (codes, scales))
    return tiles.as_packed(part, codes.contiguous(), scales)


# --- scales ----------------------------------------------------------------------------------------------------------


def codes_and_scales(layer: Packed) -> tuple[Tensor, Tensor, float, int]:
    """Codes [rows, columns / 2], scale bytes [rows, columns / 16], factor and MXFP4's largest exponent."""
    codes, scales = layer.tensors["weight_packed"], layer.tensors["weight_scale"]
    if layer.weights_format == "nvfp4":
        stored = scales.view(torch.uint8)
        if bool((stored >= 0x7F).any()):
            raise FormatError("an NVFP4 scale is negative or no number; quantize the checkpoint again")
        empty = stored == 0
        factor = 2.0**LEFT / layer.tensors["weight_global_scale"].item()
        return _without(codes, empty), _e5m3(codes.device)[0][stored.long()], factor, 0
    top = int(scales.max())
    shifted = scales.int() - top + _MX_TOP
    factor = 2.0 ** (LEFT + top - 127)
    bytes_ = shifted.clamp(min=0).to(torch.uint8).repeat_interleave(2, dim=1)
    return _without(codes, (shifted < 1).repeat_interleave(2, dim=1)), bytes_, factor, top


def _without(codes: Tensor, empty: Tensor) -> Tensor:
    """Codes with the groups `empty` [rows, columns / 16] at zero."""
    return (
        codes.view(*empty.shape, 8).masked_fill(empty[..., None], 0).view(codes.shape) if bool(empty.any()) else codes
    )


@cache
def _e5m3(device: torch.device) -> tuple[Tensor, Tensor]:
    """From E4M3 bytes (positive) to E5M3, whose value is (1 + m / 8) * 2^(e - 9), and back; 256 entries each."""
    forward, back = torch.zeros(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    mantissa, exponent = torch.frexp(values[1:])  # in [0.5, 1)
    codes = ((exponent - 1 + 9) * 8 + (mantissa * 2 - 1) * 8).to(torch.uint8)
    forward[1:127] = codes
    back[codes.long()] = torch.arange(1, 127, dtype=torch.uint8)
    return forward.to(device), back.to(device)


# --- order -----------------------------------------------------------------------------------------------------------


def _interleave(two: Sequence[Tensor]) -> Tensor:
    return torch.stack([t.view(-1, 8, t.shape[1]) for t in two], dim=1).view(-1, two[0].shape[1])


def _bits(place: int, upper: int) -> list[int]:
    """The bits of a word that hold a code's bits 3 (the sign) to 0."""
    return [(bit + 16 * upper) % 32 for bit in _PLACES[place]]


@cache
def code_words(device: torch.device) -> Tensor:
    """[2, 4, 16] int32 words that hold one code alone, by upper or lower half and place."""
    words = [
        [
            [sum((code >> 3 - i & 1) << bit for i, bit in enumerate(_bits(place, upper))) for code in range(16)]
            for place in range(4)
        ]
        for upper in range(2)
    ]
    return torch.tensor(words, device=device).int()


def _to_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Blocks, uint8 [blocks of rows, blocks of columns, 8, 1152], of codes [rows, columns / 2] and scale bytes."""
    missing = -codes.shape[0] % BLOCK_ROWS
    codes, scales = (torch.nn.functional.pad(t, (0, 0, 0, missing)) for t in (codes, scales))
    parts = zip(codes.split(_ROWS_AT_A_TIME), scales.split(_ROWS_AT_A_TIME), strict=True)
    return torch.cat([torch.cat([_tile_codes(c), _tile_scales(s)], dim=-1) for c, s in parts])


def _tile_codes(codes: Tensor) -> Tensor:
    # A row of a tile is r + 8 * h; a column of a group is 2 * t + 8 * q + e; a lane is 4 * r + t.
    nibbles = torch.stack((codes & 0xF, codes >> 4), dim=-1).view(-1, 8, 2, 8, codes.shape[1] // 64, 2, 4, 2, 4, 2)
    placed = code_words(codes.device)
    words = torch.zeros((*nibbles.shape[:2], *nibbles.shape[3:7], 4), dtype=torch.int32, device=codes.device)
    for h, q, e in product(range(2), repeat=3):
        words |= placed[e, h + 2 * q][nibbles[:, :, h, :, :, :, :, q, :, e].int()]  # [blocks, 8, r, blocks, 2, 4, t]
    return words.permute(0, 3, 1, 4, 2, 6, 5).contiguous().view(torch.uint8).flatten(3)


def _tile_scales(scales: Tensor) -> Tensor:
    return scales.view(-1, 8, 2, 8, scales.shape[1] // 8, 8).permute(0, 4, 1, 3, 2, 5).flatten(3)


def _from_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `_to_blocks`, padding rows included."""
    rows, columns = blocks.shape[0] * BLOCK_ROWS, blocks.shape[1] * BLOCK_COLUMNS
    scales = blocks[..., _CODE_BYTES:].view(*blocks.shape[:3], 8, 2, 8).permute(0, 2, 4, 3, 1, 5)
    codes = [_untile_codes(part) for part in blocks[..., :_CODE_BYTES].split(_ROWS_AT_A_TIME // BLOCK_ROWS)]
    return torch.cat(codes).view(rows, columns // 2), scales.reshape(rows, columns // 16)


def _untile_codes(blocks: Tensor) -> Tensor:
    words = blocks.contiguous().view(torch.int32).view(*blocks.shape[:3], 2, 8, 4, 4).permute(0, 2, 4, 1, 3, 6, 5)
    nibbles = [[codes_at(words, h + 2 * q) for q in range(2)] for h in range(2)]  # [blocks, 8, r, blocks, 2, 4, t, e]
    by_row = torch.stack([torch.stack(two, dim=6) for two in nibbles], dim=2)  # h before r, q before t
    return (by_row[..., 0] | by_row[..., 1] << 4).flatten(0, 3).flatten(1)


def codes_at(words: Tensor, place: int) -> Tensor:
    """The two codes [..., 2] at a place in the lower and upper half of int32 words."""
    both = [sum((words >> bit & 1) << 3 - i for i, bit in enumerate(_bits(place, upper))) for upper in range(2)]
    return torch.stack(both, dim=-1).to(torch.uint8)  # type: ignore[arg-type]
