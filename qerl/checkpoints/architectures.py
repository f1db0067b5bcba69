"""Architectures of known models. The workflow reads them on every call, so this module imports no large library."""

from __future__ import annotations

from typing import NamedTuple


class Architecture(NamedTuple):
    """Widths and counts of a model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied_embeddings: bool


#: Sizes of Qwen2.5, and 8B with the widths of Qwen3-8B, whose norms of q and k it lacks.
ARCHITECTURES = {
    "tiny": Architecture(64, 2, 2, 1, 128, 151936, True),
    "small": Architecture(512, 4, 4, 2, 1024, 151936, True),
    "1.5B": Architecture(1536, 28, 12, 2, 8960, 151936, True),
    "3B": Architecture(2048, 36, 16, 2, 11008, 151936, True),
    "7B": Architecture(3584, 28, 28, 4, 18944, 152064, False),
    "8B": Architecture(4096, 36, 32, 8, 12288, 151936, False),
    "14B": Architecture(5120, 48, 40, 8, 13824, 152064, False),
    "32B": Architecture(5120, 64, 40, 8, 27648, 152064, False),
}

#: Projections with the same input, which engines run as one product, in the order of a block.
FUSED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


def linear_shapes(size: str) -> dict[str, tuple[int, int]]:
    """[out, in] of the seven projections of a block, in its order."""
    hidden, _, heads, kv_heads, intermediate, _, _ = ARCHITECTURES[size]
    narrow = hidden // heads * kv_heads
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
