"""Sizes and norms that the operations of a decode step share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

#: Tokens per page of the KV cache.
PAGE = 64
#: Logits that one program reads when a token is drawn. The random numbers of a token depend on it.
CHUNK = 4096


@dataclass(frozen=True)
class Norm:
    """An RMSNorm's tensors, which are the policy's own: (offset + weight + noise) x / rms(x)."""

    weight: Tensor
    noise: Tensor | None
    eps: float
    offset: float


@dataclass(frozen=True)
class Heads:
    """Attention heads of a block: numbers of `query` and `kv` heads of size `dim`, and the norms of both, if any."""

    query: int
    kv: int
    dim: int
    scale: float
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    #: 0 for norms as in Qwen3, which round before they scale, and 1 for those of Gemma, (1 + w) x / rms(x).
    norm_offset: float = 0.0
    #: The tokens that a token sees, itself included; None: all so far.
    window: int | None = None
    #: The score [query] of a further key without a value, if any.
    sinks: Tensor | None = None
    #: Whether a gate of its results follows each query head, as in Qwen3.5: they are multiplied by the gate's sigmoid.
    gated: bool = False

    @property
    def pitch(self) -> int:
        """Features of qkv from one query head to the next."""
        return 2 * self.dim if self.gated else self.dim

    @property
    def width(self) -> int:
        """Features of qkv: query heads, each with its gate if there are any, then keys and values."""
        return self.query * self.pitch + 2 * self.kv * self.dim

    def parts(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries [n, query, dim], keys and values [n, kv, dim], and gates as queries or None, of qkv [n, width]."""
        heads = qkv.view(len(qkv), -1, self.dim)
        queries, keys, values = heads.split([self.query * self.pitch // self.dim, self.kv, self.kv], dim=1)
        return (queries[:, ::2], keys, values, queries[:, 1::2]) if self.gated else (queries, keys, values, None)


def pages_per_split(pages: int) -> int:
    """The number of pages to which one program attends, by the pages of its sequence.

    Short sequences need many programs to keep the GPU busy, long ones few results to combine. `qerl.kernels.attention`
    has the same rule for the device.
    """
    return next(size for size in (1, 2, 4, 8, 16) if pages <= 8 * size * size or size == 16)


def splits_of(pages: int) -> int:
    """The most splits of a sequence of up to `pages` pages, rounded up to a power of two to need few graphs."""
    most = max(-(-count // pages_per_split(count)) for count in range(1, pages + 1))
    return 1 << (most - 1).bit_length()
