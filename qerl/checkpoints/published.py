"""Shapes of published models of other families than Qwen2.5, as values of config.json, for benches on random weights.

The workflow reads them on every call, so this module imports no large library.
"""

from __future__ import annotations

from typing import Any

from qerl.checkpoints.architectures import ARCHITECTURES
from qerl.checkpoints.model_shape import ModelShape

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_GEMMA_ROPE = {
    "sliding_attention": _ROPE,
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
}
_HYBRID_ROPE = {
    **_ROPE,
    "rope_theta": 10000000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _shape(
    kind: str, hidden: int, layers: int, heads: int, kv: int, intermediate: int | None, vocabulary: int, **others: Any
) -> dict[str, Any]:
    wide = {} if intermediate is None else {"intermediate_size": intermediate}
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": None,
        **wide,
        **others,
    }


def _every(last: str, others: str, period: int, layers: int) -> list[str]:
    """Kinds of blocks, of which the last of each `period` is another."""
    return [last if layer % period == period - 1 else others for layer in range(layers)]


def _gemma(hidden: int, layers: int, heads: int, kv: int, intermediate: int, window: int) -> dict[str, Any]:
    return _shape(
        "gemma3_text", hidden, layers, heads, kv, intermediate, 262144, head_dim=256, query_pre_attn_scalar=256,
        sliding_window=window, layer_types=_every("full_attention", "sliding_attention", 6, layers),
        rope_parameters=_GEMMA_ROPE, tie_word_embeddings=True,
    )  # fmt: skip


def _hybrid(layers: int, value_heads: int) -> dict[str, Any]:
    return {
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
        "layer_types": _every("full_attention", "linear_attention", 4, layers),
        "rope_parameters": _HYBRID_ROPE,
    }


#: Values of config.json by name. Of models with images they are the text model's.
PUBLISHED: dict[str, dict[str, Any]] = {
    "mistral-7b": _shape("mistral", 4096, 32, 32, 8, 14336, 32000, sliding_window=4096, head_dim=128),
    # Positions of Phi-4-mini's scaled frequencies take as long as any.
    "phi-4-mini": _shape(
        "phi3", 3072, 32, 24, 8, 8192, 200064, sliding_window=262144, tie_word_embeddings=True,
        rope_parameters={**_ROPE, "partial_rotary_factor": 0.75},
    ),
    "phi-4": _shape("phi3", 5120, 40, 40, 10, 17920, 100352, sliding_window=None, rope_parameters=_ROPE),
    "gemma-3-1b": _gemma(1152, 26, 4, 1, 6912, 512),
    "gemma-3-12b": {**_gemma(3840, 48, 16, 8, 15360, 1024), "vocab_size": 262208},
    "qwen3-30b-a3b": _shape(
        "qwen3_moe", 2048, 48, 32, 4, 6144, 151936, head_dim=128, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, rope_parameters={**_ROPE, "rope_theta": 1000000.0},
    ),
    # The published files have MXFP4 experts, and the rest in bfloat16.
    "gpt-oss-20b": _shape(
        "gpt_oss", 2880, 24, 64, 8, 2880, 201088, head_dim=64, sliding_window=128, num_local_experts=32,
        num_experts_per_tok=4, max_position_embeddings=131072, attention_bias=True, rope_parameters=_GPT_OSS_ROPE,
        layer_types=_every("full_attention", "sliding_attention", 2, 24),
    ),
    # Qwen3.6-27B has this shape, too.
    "qwen3.5-27b": _shape("qwen3_5_text", 5120, 64, 24, 4, 17408, 248320, **_hybrid(64, 48)),
    # And Qwen3.6-35B-A3B has this one.
    "qwen3.5-35b-a3b": _shape(
        "qwen3_5_moe_text", 2048, 40, 16, 2, None, 248320, num_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, **_hybrid(40, 32),
    ),
}  # fmt: skip
#: Kinds of models whose published files have packed experts alone, in MXFP4.
EXPERTS_ALONE = ("gpt_oss",)
#: The sizes that benches know, Qwen2.5's first.
SIZES = (*ARCHITECTURES, *PUBLISHED)


def vocabulary(size: str) -> int:
    """The number of tokens that a size knows."""
    return ARCHITECTURES[size].vocabulary if size in ARCHITECTURES else int(PUBLISHED[size]["vocab_size"])


def has_packed_experts_alone(size: str) -> bool:
    """Whether the published files of a size have experts in MXFP4, and all else in bfloat16."""
    return size in PUBLISHED and PUBLISHED[size]["model_type"] in EXPERTS_ALONE


def prompt_ids(tokens: int) -> tuple[int, int]:
    """The least id of a random prompt and the one behind the largest, for a vocabulary of so many tokens; none of them
    is special.
    """
    return min(1000, tokens // 2), min(100000, tokens)


def shape_of(size: str, pack_delta_nets: bool = False) -> ModelShape:
    """The shape of a size of Qwen2.5 or of a published model."""
    if size in PUBLISHED:
        return ModelShape.of(PUBLISHED[size]).with_packed_nets(pack_delta_nets)
    hidden, layers, heads, kv_heads, intermediate, vocabulary, tied = ARCHITECTURES[size]
    narrow = hidden // heads * kv_heads
    return ModelShape(hidden, layers, hidden, narrow, heads, intermediate, vocabulary, tied, biased=True)
