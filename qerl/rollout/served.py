"""Which samplers serve a model: the eager sampler any that is handled, the engine and vLLM some of them."""

from __future__ import annotations

from typing import Any

from qerl.layers.structure import structure_of

#: Values of `model_type` with which the samplers are tested.
_ENGINE = ("qwen2", "qwen3", "llama", "mistral")
_VLLM = ("qwen2", "qwen3", "llama")
#: Types of rotary embeddings whose frequencies depend on the length of the text.
_CHANGING_ROPE = ("dynamic", "longrope")


def refused_by_engine(config: Any) -> str | None:
    """A sentence that says why the engine doesn't serve a model of this configuration; None if it does."""
    kind, rope = getattr(config, "model_type", ""), getattr(config, "rope_parameters", None) or {}
    if kind not in _ENGINE:
        return f"the native engine supports {', '.join(_ENGINE)}, not {kind!r}"
    if rope.get("rope_type") in _CHANGING_ROPE:
        return f"the native engine has no {rope['rope_type']} rotary positions"
    if any(structure_of(config).windows):
        return "the native engine has no sliding-window attention"
    if getattr(config, "hidden_act", "silu") != "silu":
        return "the native engine supports only SiLU as the activation"
    return None


def refused_by_vllm(config: Any) -> str | None:
    """A sentence that says why vLLM doesn't sample for a model of this configuration; None if it does."""
    kind = getattr(config, "model_type", "")
    if kind not in _VLLM:
        return f"sampling by vLLM is tested with {', '.join(_VLLM)}, not {kind!r}"
    return None
