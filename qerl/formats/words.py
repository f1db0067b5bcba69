"""The layout of NVFP4 and MXFP4 weights for the portable kernels: the same codes and scales in another order.

A weight [rows, columns] is cut into blocks of 128 columns. Of each block, all rows' codes follow each other, and all
rows' scales:

* codes: [block][row][16] words of 32 bits. A word holds the codes of eight columns in the places of
  `qerl.formats.tiles`. A rotation and a mask bring two codes to their places in a pair of bfloat16.
* scales: [block][row][8 groups of 16 columns], for MXFP4 [4 groups of 32] bytes, decoded as those of tiles.

The last block of a width such as gpt-oss's 2,880 has codes of zero after the last column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from qerl.formats.codecs import Packed
from qerl.formats.tiles import KERNEL_FORMATS, KernelWeights, code_words, codes_and_scales, codes_at
from qerl.settings.formats import FORMATS

BLOCK_COLUMNS = 128
WORDS = BLOCK_COLUMNS // 8


@dataclass(frozen=True)
class Words(KernelWeights):
    """`data` has all codes, then all scales."""

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


def fits(weights_format: str, shapes: Sequence[tuple[int, int]]) -> bool:
    """Whether layers of these shapes [rows, columns] can be stored as words without columns that they lack."""
    return weights_format in KERNEL_FORMATS and all(columns % BLOCK_COLUMNS == 0 for _, columns in shapes)


def pack(layers: Sequence[Packed]) -> Words:
    """Store the weights of `layers` on their device. Raises `FormatError` unless scales are positive numbers."""
    weights_format, columns = layers[0].weights_format, layers[0].shape[1]
    codes, scales, factors, largest = zip(*map(codes_and_scales, layers), strict=True)
    step = FORMATS[weights_format].group_size // 16
    words, bytes_ = _to_words(torch.cat(codes)), torch.cat(scales)[:, ::step]
    return Words(
        data=torch.cat([_to_blocks(words, WORDS), _to_blocks(bytes_, BLOCK_COLUMNS // 16 // step)]),
        weights_format=weights_format,
        parts=tuple(layer.shape[0] for layer in layers),
        columns=columns,
        factors=factors,
        global_scales=tuple(layer.tensors.get("weight_global_scale") for layer in layers),
        largest_exponents=largest,
    )


def unpack(words: Words, part: int) -> Packed:
    """The weight of a layer as `pack` received it, except that a group with scale zero has codes of zero."""
    start, rows = sum(words.parts[:part]), words.parts[part]
    codes, scales = (t[:, start : start + rows].transpose(0, 1).flatten(1) for t in (words.codes, words.scales))
    codes, scales = codes[:, : words.columns // 8], scales[:, : words.columns // words.group]
    every = scales.repeat_interleave(words.group // 16, dim=1)
    return words.as_packed(part, _from_words(codes), every)


def _to_blocks(items: Tensor, each: int) -> Tensor:
    """Bytes, uint8 [n], of items [rows, n] in the order of blocks, rows, `each` items of a row; zeros fill the last."""
    items = torch.nn.functional.pad(items, (0, -items.shape[1] % each))
    return items.view(len(items), -1, each).transpose(0, 1).contiguous().view(torch.uint8).flatten()


def _to_words(codes: Tensor) -> Tensor:
    """Words, int32 [rows, columns / 8], of codes [rows, columns / 2] with the low nibble first."""
    nibbles = torch.stack((codes & 0xF, codes >> 4), dim=-1).view(len(codes), -1, 4, 2)
    placed = code_words(codes.device)
    words = torch.zeros(nibbles.shape[:2], dtype=torch.int32, device=codes.device)
    for place, half in product(range(4), range(2)):
        words |= placed[half, place][nibbles[:, :, place, half].int()]
    return words


def _from_words(words: Tensor) -> Tensor:
    """The inverse of `_to_words`."""
    pairs = [codes_at(words, place) for place in range(4)]
    return torch.stack([pair[..., 0] | pair[..., 1] << 4 for pair in pairs], dim=-1).flatten(1)
