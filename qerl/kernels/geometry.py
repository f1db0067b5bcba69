"""Sizes that the operations of a decode step share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

#: Tokens of a page of the cache.
PAGE = 64
#: Tokens of a sequence that one program attends to; a multiple of PAGE.
SPLIT = 256
#: Logits that one program of the draw reads; the draws depend on it.
CHUNK = 4096


@dataclass(frozen=True)
class Heads:
    """Attention heads of a block: `query` and `kv` of `dim` each; Qwen3 normalises queries and keys."""

    query: int
    kv: int
    dim: int
    scale: float
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0


def splits_of(tokens: int) -> int:
    """Programs for a sequence of `tokens`, a power of two: few different grids."""
    return 1 << (-(-tokens // SPLIT) - 1).bit_length()
