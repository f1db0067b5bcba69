"""Sizes that the operations of a decode step share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

#: Tokens of a page of the cache.
PAGE = 64
#: Logits that one program of the draw reads. The noise of a token depends on it.
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


def pages_per_split(pages: int) -> int:
    """Pages of one sequence that one program attends to, by the pages that the sequence has.

    Short sequences need many programs at work, long ones few results to combine. `qerl.kernels.attention` has the same
    rule for the device.
    """
    return next(size for size in (1, 2, 4, 8, 16) if pages <= 8 * size * size or size == 16)


def splits_of(pages: int) -> int:
    """Most programs that a sequence of up to `pages` pages takes, rounded up to a power of two: few graphs."""
    most = max(-(-count // pages_per_split(count)) for count in range(1, pages + 1))
    return 1 << (most - 1).bit_length()
