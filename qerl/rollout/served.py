"""Which samplers serve a model: the eager sampler any that is handled, the engine and vLLM some of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from qerl.checkpoints.folder import whole_model
from qerl.kernels.activations import Activation
from qerl.kernels.kv_cache import LEAST_FP8_CAPABILITY
from qerl.layers.empty_model import rope_types
from qerl.layers.structure import structure_of
from qerl.settings.base import ConfigError
from qerl.settings.rollout import EngineSettings

#: Values of `model_type` with which vLLM is tested.
_VLLM = ("qwen2", "qwen3", "llama", "mistral", "phi3", "gemma3_text")
#: Those with delta nets, whose convolution has the model's activation.
_HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text")
#: Those with which the engine is tested.
_ENGINE = (*_VLLM, "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", *_HYBRIDS)
#: A type of rotary embeddings whose frequencies depend on the length of the text.
_CHANGING_ROPE = "dynamic"


def refused_by_engine(config: Any, weights: str | None = None) -> str | None:
    """A sentence that says why the engine doesn't serve a model of this configuration and weights; None if it does."""
    kind = getattr(config, "model_type", "")
    if kind not in _ENGINE:
        return f"the native engine supports {', '.join(_ENGINE)}, not {kind!r}"
    if weights == "nf4" and hasattr(config, "num_experts_per_tok"):
        return "the native engine has no grouped product of nf4 experts"
    if _CHANGING_ROPE in rope_types(config):
        return f"the native engine has no {_CHANGING_ROPE} rotary positions"
    if (activation := activation_of(config)) not in get_args(Activation):
        return f"the native engine supports {' and '.join(get_args(Activation))} as the activation, not {activation!r}"
    if kind in _HYBRIDS and activation != "silu":
        return f"the native engine supports silu as the activation of delta nets, not {activation!r}"
    if structure_of(config).logit_cap is not None:
        return "the native engine has no soft cap of logits"
    return None


def refused_fp8_cache(capability: tuple[int, int] | None) -> str | None:
    """A sentence that says why a GPU of this capability, or with None a CPU, has no KV cache in FP8; None if it has."""
    if capability is None or capability >= LEAST_FP8_CAPABILITY:
        return None  # the engine runs on CPUs in tests
    have, least = (".".join(map(str, one)) for one in (capability, LEAST_FP8_CAPABILITY))
    return (
        f"rollout.native.kv_cache_dtype=fp8 needs a GPU of compute capability {least} (RTX 40, L40S) or newer, and "
        f"this one has {have}; use auto"
    )


def activation_of(config: Any) -> str:
    """The name of the activation of a model's MLPs, as its configuration has it."""
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu"))


def refused_by_vllm(config: Any) -> str | None:
    """A sentence that says why vLLM doesn't sample for a model of this configuration; None if it does."""
    kind = getattr(config, "model_type", "")
    if kind not in _VLLM:
        return f"sampling by vLLM is tested with {', '.join(_VLLM)}, not {kind!r}"
    if structure_of(config).logit_cap is not None:
        return "sampling by vLLM is tested with models without a soft cap of logits"
    folder = getattr(config, "name_or_path", "")
    if folder and whole_model(Path(folder)):
        return f"sampling by vLLM is tested with models of text alone, and {folder} is one of images and text"
    return None


def check_served(config: Any, settings: EngineSettings) -> None:
    """Raise `ConfigError` if the settings select vLLM and it doesn't sample for a model of this configuration."""
    if settings.engine != "native" and (refusal := refused_by_vllm(config)):
        raise ConfigError(f"{refusal}; use {settings.engine_key}=native")
