"""Families of models with a small configuration each, from which the table of families and its tests are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "vocab_size": 102,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
}


@dataclass(frozen=True)
class Family:
    """A family of the hub: its name, a word on it, and `values` of config.json that make a small model of it."""

    name: str
    about: str
    values: dict[str, Any]

    def config(self, **changes: Any) -> PreTrainedConfig:
        """The configuration of a small model, with `changes` of its values."""
        return AutoConfig.for_model(**{**_SHAPE, **self.values, **changes})


FAMILIES: dict[str, Family] = {
    "qwen2": Family("Qwen2, Qwen2.5", "dense", {"model_type": "qwen2", "tie_word_embeddings": True}),
    "qwen3": Family("Qwen3", "dense", {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True}),
    "llama": Family("Llama 3", "dense", {"model_type": "llama", "rope_parameters": _LLAMA_ROPE}),
    "mistral": Family(
        "Mistral (7B from v0.2, Nemo)",
        "dense",
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
    ),
    "mistral-sliding": Family(
        "Mistral 7B v0.1", "sliding window", {"model_type": "mistral", "head_dim": 16, "sliding_window": 8}
    ),
    "phi3": Family(
        "Phi-3, Phi-4",
        "fused q, k, v and gate, up; part of a head rotates in Phi-4-mini",
        {
            "model_type": "phi3",
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        },
    ),
    "gemma3": Family(
        "Gemma 3 (text: 270M, 1B)",
        "norms 1 + w before and after, norms of q and k, sliding windows, scaled embedding",
        {
            "model_type": "gemma3_text",
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": _GEMMA_ROPE,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe": Family(
        "Qwen3-MoE",
        "experts stacked in one parameter",
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "qwen3_5": Family("Qwen3.5, Qwen3.6 (dense)", "gated delta nets", {"model_type": "qwen3_5_text", "head_dim": 16}),
    "gpt_oss": Family(
        "gpt-oss",
        "attention sinks, experts stacked in one parameter",
        {"model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
