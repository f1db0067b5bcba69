"""The context length of a model, read from its config.json, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qerl.settings.base import ConfigError
from qerl.settings.rollout import EngineSettings

#: Types of rotary embeddings whose `max_position_embeddings` already is the scaled length.
_SCALED_ALREADY = ("default", "llama3")
#: Models that state the scaled length whatever the type of their rotary embeddings.
_STATING_SCALED = ("gemma3_text",)
#: Types whose frequencies change for all sequences of a batch when one passes the original length.
_CHANGING = ("longrope", "su", "dynamic")


def context_length(config: Mapping[str, Any]) -> int | None:
    """The longest prompt with its completion, in tokens. None if config.json doesn't say.

    It is `max_position_embeddings`, times the factor of a linearly scaled rotary embedding, as in vLLM.
    Gemma 3 states the scaled length there. With YaRN some checkpoints do and some state the original one, so the larger
    of both counts. With longrope and dynamic scaling it is the original length, up to which sampler and update have the
    same frequencies. A sliding window limits attention, not the length.
    """
    stated = config.get("max_position_embeddings")
    if type(stated) is not int or stated <= 0:
        return None
    # Transformers 5 writes rope_parameters, earlier versions rope_scaling; "type" is the older name of "rope_type".
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind, factor = scaling.get("rope_type", scaling.get("type", "default")), scaling.get("factor") or 1.0
    if kind in _SCALED_ALREADY or config.get("model_type") in _STATING_SCALED:
        return stated
    original = (
        scaling.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or stated
    )
    if kind in _CHANGING:
        return min(stated, original)
    return max(stated, int(original * factor)) if kind == "yarn" else int(stated * factor)


def usable_length(config: Mapping[str, Any], engine: EngineSettings) -> int | None:
    """The context, limited by the engine's setting (`vllm.max_model_len`)."""
    lengths = [context_length(config), engine.vllm.max_model_len if engine.engine == "vllm" else None]
    return min((length for length in lengths if length is not None), default=None)


def check_room(context: int | None, max_tokens: int, key: str) -> None:
    """Raise `ConfigError` if completions alone fill the whole context. `key` is that of `max_tokens`."""
    if context is not None and max_tokens >= context:
        raise ConfigError(
            f"{key}={max_tokens} leaves no room for a prompt: the model's context has {context} tokens "
            f"(max_position_embeddings of its config.json); set max_tokens below that, such as {context // 2}"
        )
