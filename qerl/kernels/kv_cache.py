"""The KV cache of decoded sequences: keys and values in pages, in the model's dtype or rounded to FP8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl.kernels.geometry import PAGE, Heads

#: The dtype of rounded elements, with 4 bits of exponent and 3 of mantissa.
FP8 = torch.float8_e4m3fn
#: The compute capability from which GPUs convert to and from FP8; Triton has no conversion for older ones.
LEAST_FP8_CAPABILITY = (8, 9)
#: The largest element of a key or value is a scale times [128, 256). FP8 has numbers up to 448.
LARGEST = 128.0
#: A key or value with smaller elements gets the scale of this one.
SMALLEST = 2.0**-100
#: The bits of a float32's exponent, with which it is a power of two.
EXPONENT = 0x7F800000


@dataclass(frozen=True)
class KVCache:
    """Pages of keys and values of all blocks, or of one block, then without the first dimension.

    In FP8 each key and each value of a head has a scale. It is a power of two, so that a rounded element times its
    scale is exact in bfloat16: prompts attend in bfloat16 to what decode steps read in FP8.
    """

    data: Tensor  # [layers, pages, 2, Hkv, PAGE, D], in the model's dtype or FP8
    scales: Tensor | None = None  # [layers, pages, 2, Hkv, PAGE] float32, with FP8

    @classmethod
    def empty(cls, layers: int, pages: int, heads: Heads, dtype: torch.dtype, device: torch.device) -> KVCache:
        """A cache of zeros in `dtype`, because attention multiplies masked tokens by 0."""
        data = torch.zeros(layers, pages, 2, heads.kv, PAGE, heads.dim, dtype=dtype, device=device)
        return cls(data, torch.zeros(data.shape[:-1], device=device) if dtype == FP8 else None)

    @property
    def pages(self) -> int:
        """Number of pages of a block."""
        return self.data.shape[-5]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def blocks(self) -> Iterator[KVCache]:
        """The cache of each block."""
        for number, data in enumerate(self.data):
            yield KVCache(data, None if self.scales is None else self.scales[number])

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy the pages `source` [n] to `target` [n] in each block."""
        for block in self.blocks():
            # Bytes, because not every operation knows FP8.
            for part in (_as_bytes(block.data), block.scales):
                if part is not None:
                    part[target] = part[source]

    def put(self, page: Tensor, place: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [n, Hkv, D] of tokens at `place` [n] in `page` [n] of a block.

        Returns them as `pages_of` does.
        """
        if self.scales is None:
            self.data[page, 0, :, place], self.data[page, 1, :, place] = key, value
            return key, value
        both, scales = rounded(torch.stack([key, value], 1))
        _as_bytes(self.data)[page, :, :, place] = both.view(torch.uint8)
        self.scales[page, :, :, place] = scales
        return _exact(both, scales, key.dtype).unbind(1)  # type: ignore[return-value]

    def pages_of(self, pages: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys and values [B, P, 2, Hkv, PAGE, D] of the pages [B, P] of a block."""
        if self.scales is None:
            return self.data[pages]
        return _exact(_as_bytes(self.data)[pages].view(FP8), self.scales[pages], dtype)


def page_bytes(heads: int, dim: int, dtype: torch.dtype) -> int:
    """Bytes of a page of a block's keys and values, for so many KV heads of size `dim`."""
    return 2 * heads * PAGE * (dim * dtype.itemsize + (torch.float32.itemsize if dtype == FP8 else 0))


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Keys or values [..., D] in FP8, and the scales [...] by which they are multiplied."""
    peak = x.float().abs().amax(-1).clamp(min=SMALLEST)
    scales = (peak.view(torch.int32) & EXPONENT).view(torch.float32) / LARGEST
    return (x.float() / scales[..., None]).to(FP8), scales


def _exact(both: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (both.float() * scales[..., None]).to(dtype)


def _as_bytes(data: Tensor) -> Tensor:
    return data.view(torch.uint8) if data.dtype == FP8 else data
