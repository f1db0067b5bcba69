"""The layouts of NVFP4 and MXFP4 weights for the GPU's kernels: the same codes and scales in another order.

A weight [rows, columns] is cut into blocks. A word of 32 bits holds eight codes in places from which a rotation and a
mask bring two of them to their bits in a pair of bfloat16. A byte b of a scale stands for the bfloat16 with the bits
b * multiplier + offset.

NVFP4's E4M3 scales are always positive and become "E5M3". Subnormal ones are normalised, so that a shift and an
addition decode all. MXFP4's E8M0 scales keep 245 binades below the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Self

import torch
from torch import Tensor

from qerl.formats.codecs import Packed
from qerl.settings.models import FORMATS, FormatError

#: Formats that have kernels of their own.
KERNEL_FORMATS = ("nvfp4", "mxfp4")
BLOCK_ROWS, BLOCK_COLUMNS = 128, 128
_TILE_ROWS = 16
_CODE_BYTES = _TILE_ROWS * BLOCK_COLUMNS // 2
_SCALE_BYTES = BLOCK_COLUMNS
#: Words of a row's codes in a block.
WORDS = BLOCK_COLUMNS // 8
#: Bytes of a block of tiles.
BLOCK_BYTES = BLOCK_ROWS // _TILE_ROWS * (_CODE_BYTES + _SCALE_BYTES)
#: Bits of a bfloat16 scale are byte * multiplier + offset. Scales come out times 2^118, and a code's place is worth
#: 2^-126: products are 2^-LEFT of the weight's.
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

    def unpack(self, part: int) -> Packed:
        """The weight of a layer as `pack` received it, except that a group with scale zero has codes of zero."""
        codes, scales = self._rows_of(part)
        if self.weights_format == "mxfp4":
            exponents = scales[:, ::2].int() + self.largest_exponents[part] - _MX_TOP
            tensors = {"weight_scale": exponents.clamp(min=0).to(torch.uint8)}
        else:
            global_scale = self.global_scales[part]
            assert global_scale is not None
            stored = _e5m3(scales.device)[1][scales.long()].view(torch.float8_e4m3fn)
            tensors = {"weight_scale": stored, "weight_global_scale": global_scale}
        return Packed(self.weights_format, (self.parts[part], self.columns), {"weight_packed": codes, **tensors})

    def _rows_of(self, part: int) -> tuple[Tensor, Tensor]:
        """A layer's codes [rows, columns / 2] and scale bytes [rows, columns / 16], as `_codes_and_scales`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Tiles(KernelWeights):
    """The layout of the decode product on Hopper: `data` is [blocks of rows, blocks of columns, 8, 1152].

    A block of 128 rows and 128 columns has 8 tiles of 16 rows. A tile has 1,024 bytes of codes, then 128 of scales:

    * codes: [half of the columns][lane][4] words, which have what a lane of a warp needs as its part of a 16 x 16
      operand of the tensor cores. Three in four codes reach their place in a pair of bfloat16 by at most one rotation
      and one mask, the fourth by two. (No placement needs one for each: 4 rotations of the places 15, 8, 7 and 6 don't
      cover 16 bits.)
    * scales: [8 rows][row r, row r + 8][8 groups of 16 columns] bytes; each of MXFP4 twice.

    Two layers may be `interleaved` by 8 rows.
    """

    interleaved: bool = False

    @staticmethod
    def fits(weights_format: str, shapes: Sequence[tuple[int, int]]) -> bool:
        """Whether layers of these shapes [rows, columns] can be stored as tiles."""
        divides = all(rows % _TILE_ROWS == 0 and columns % (2 * BLOCK_COLUMNS) == 0 for rows, columns in shapes)
        return weights_format in KERNEL_FORMATS and divides

    @classmethod
    def pack(cls, layers: Sequence[Packed], interleaved: bool = False) -> Self:
        """Store the weights of `layers` on their device. Raises `FormatError` unless scales are positive numbers."""
        codes, scales, about = _parts(layers)

        def join(layers: tuple[Tensor, ...]) -> Tensor:
            if not interleaved:
                return torch.cat(layers)
            return torch.stack([t.view(-1, 8, t.shape[1]) for t in layers], dim=1).view(-1, layers[0].shape[1])

        return cls(data=_to_blocks(join(codes), join(scales)), interleaved=interleaved, **about)

    def _rows_of(self, part: int) -> tuple[Tensor, Tensor]:
        codes, scales = _from_blocks(self.data)
        if self.interleaved:
            codes, scales = (t[: self.rows].view(-1, 2, 8, t.shape[1])[:, part].flatten(0, 1) for t in (codes, scales))
        else:
            start = sum(self.parts[:part])
            codes, scales = (t[start : start + self.parts[part]] for t in (codes, scales))
        return codes.contiguous(), scales


@dataclass(frozen=True)
class Words(KernelWeights):
    """The layout of the portable kernels: `data` has all codes, then all scales.

    Of each block of 128 columns, all rows' codes follow each other, and all rows' scales:

    * codes: [block][row][16] words of eight columns each;
    * scales: [block][row][8 groups of 16 columns] bytes, for MXFP4 [4 groups of 32].

    The last block of a width such as gpt-oss's 2,880 has codes of zero after the last column.
    """

    @property
    def blocks(self) -> int:
        """Blocks of columns; the last one may have columns that the weight lacks."""
        return -(-self.columns // BLOCK_COLUMNS)

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return FORMATS[self.weights_format].group_size

    @property
    def codes(self) -> Tensor:
        """The codes, int32 [columns / 128, rows, 16]."""
        return self.data[: self._code_bytes].view(torch.int32).view(-1, self.rows, WORDS)

    @property
    def scales(self) -> Tensor:
        """The scales, uint8 [columns / 128, rows, 128 / group]."""
        return self.data[self._code_bytes :].view(-1, self.rows, BLOCK_COLUMNS // self.group)

    @property
    def _code_bytes(self) -> int:
        return self.rows * self.blocks * BLOCK_COLUMNS // 2

    @staticmethod
    def fits(weights_format: str, shapes: Sequence[tuple[int, int]]) -> bool:
        """Whether layers of these shapes [rows, columns] can be stored as words without columns that they lack."""
        return weights_format in KERNEL_FORMATS and all(columns % BLOCK_COLUMNS == 0 for _, columns in shapes)

    @classmethod
    def pack(cls, layers: Sequence[Packed]) -> Self:
        """Store the weights of `layers` on their device. Raises `FormatError` unless scales are positive numbers."""
        codes, scales, about = _parts(layers)
        step = FORMATS[about["weights_format"]].group_size // 16
        words, bytes_ = _to_words(torch.cat(codes)), torch.cat(scales)[:, ::step]
        data = torch.cat([_by_block(words, WORDS), _by_block(bytes_, BLOCK_COLUMNS // 16 // step)])
        return cls(data=data, **about)

    def _rows_of(self, part: int) -> tuple[Tensor, Tensor]:
        start, rows = sum(self.parts[:part]), self.parts[part]
        codes, scales = (t[:, start : start + rows].transpose(0, 1).flatten(1) for t in (self.codes, self.scales))
        codes, scales = codes[:, : self.columns // 8], scales[:, : self.columns // self.group]
        return _from_words(codes), scales.repeat_interleave(self.group // 16, dim=1)


def _parts(layers: Sequence[Packed]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], dict[str, Any]]:
    """Codes and scale bytes of each layer, as `_codes_and_scales`, and the fields of `KernelWeights` but `data`."""
    codes, scales, factors, largest = zip(*map(_codes_and_scales, layers), strict=True)
    return (
        codes,
        scales,
        {
            "weights_format": layers[0].weights_format,
            "parts": tuple(layer.shape[0] for layer in layers),
            "columns": layers[0].shape[1],
            "factors": factors,
            "global_scales": tuple(layer.tensors.get("weight_global_scale") for layer in layers),
            "largest_exponents": largest,
        },
    )


# --- scales ----------------------------------------------------------------------------------------------------------


def _codes_and_scales(layer: Packed) -> tuple[Tensor, Tensor, float, int]:
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


def _bits(place: int, upper: int) -> list[int]:
    """The bits of a word that hold a code's bits 3 (the sign) to 0."""
    return [(bit + 16 * upper) % 32 for bit in _PLACES[place]]


@cache
def _code_words(device: torch.device) -> Tensor:
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
    by_tile = scales.view(-1, 8, 2, 8, scales.shape[1] // 8, 8).permute(0, 4, 1, 3, 2, 5).flatten(3)
    return torch.cat([torch.cat([_tile_codes(part) for part in codes.split(_ROWS_AT_A_TIME)]), by_tile], dim=-1)


def _tile_codes(codes: Tensor) -> Tensor:
    # A row of a tile is r + 8 * h; a column of a group is 2 * t + 8 * q + e; a lane is 4 * r + t.
    nibbles = torch.stack((codes & 0xF, codes >> 4), dim=-1).view(-1, 8, 2, 8, codes.shape[1] // 64, 2, 4, 2, 4, 2)
    placed = _code_words(codes.device)
    words = torch.zeros((*nibbles.shape[:2], *nibbles.shape[3:7], 4), dtype=torch.int32, device=codes.device)
    for h, q, e in product(range(2), repeat=3):
        words |= placed[e, h + 2 * q][nibbles[:, :, h, :, :, :, :, q, :, e].int()]  # [blocks, 8, r, blocks, 2, 4, t]
    return words.permute(0, 3, 1, 4, 2, 6, 5).contiguous().view(torch.uint8).flatten(3)


def _from_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `_to_blocks`, padding rows included."""
    rows, columns = blocks.shape[0] * BLOCK_ROWS, blocks.shape[1] * BLOCK_COLUMNS
    scales = blocks[..., _CODE_BYTES:].view(*blocks.shape[:3], 8, 2, 8).permute(0, 2, 4, 3, 1, 5)
    codes = [_untile_codes(part) for part in blocks[..., :_CODE_BYTES].split(_ROWS_AT_A_TIME // BLOCK_ROWS)]
    return torch.cat(codes).view(rows, columns // 2), scales.reshape(rows, columns // 16)


def _untile_codes(blocks: Tensor) -> Tensor:
    words = blocks.contiguous().view(torch.int32).view(*blocks.shape[:3], 2, 8, 4, 4).permute(0, 2, 4, 1, 3, 6, 5)
    nibbles = [[_codes_at(words, h + 2 * q) for q in range(2)] for h in range(2)]  # [blocks, 8, r, blocks, 2, 4, t, e]
    by_row = torch.stack([torch.stack(two, dim=6) for two in nibbles], dim=2)  # h before r, q before t
    return (by_row[..., 0] | by_row[..., 1] << 4).flatten(0, 3).flatten(1)


def _codes_at(words: Tensor, place: int) -> Tensor:
    """The two codes [..., 2] at a place in the lower and upper half of int32 words."""
    both = [sum((words >> bit & 1) << 3 - i for i, bit in enumerate(_bits(place, upper))) for upper in range(2)]
    return torch.stack(both, dim=-1).to(torch.uint8)  # type: ignore[arg-type]


def _by_block(items: Tensor, each: int) -> Tensor:
    """Bytes, uint8 [n], of items [rows, n] in the order of blocks, rows, `each` items of a row; zeros fill the last."""
    items = torch.nn.functional.pad(items, (0, -items.shape[1] % each))
    return items.view(len(items), -1, each).transpose(0, 1).contiguous().view(torch.uint8).flatten()


def _to_words(codes: Tensor) -> Tensor:
    """Words, int32 [rows, columns / 8], of codes [rows, columns / 2] with the low nibble first."""
    nibbles = torch.stack((codes & 0xF, codes >> 4), dim=-1).view(len(codes), -1, 4, 2)
    placed = _code_words(codes.device)
    words = torch.zeros(nibbles.shape[:2], dtype=torch.int32, device=codes.device)
    for place, half in product(range(4), range(2)):
        words |= placed[half, place][nibbles[:, :, place, half].int()]
    return words


def _from_words(words: Tensor) -> Tensor:
    """The inverse of `_to_words`."""
    pairs = [_codes_at(words, place) for place in range(4)]
    return torch.stack([pair[..., 0] | pair[..., 1] << 4 for pair in pairs], dim=-1).flatten(1)
