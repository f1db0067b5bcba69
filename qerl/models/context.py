"""How many tokens a model was made for, read from its config.json alone: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Scaled rotary embeddings whose `max_position_embeddings` is the scaled length already.
_SCALED_ALREADY = ("default", "llama3", "longrope", "su")


def context_length(config: Mapping[str, Any]) -> int | None:
    """The most tokens of a prompt and its completion together; None where config.json doesn't say.

    It is `max_position_embeddings`, times the factor of a scaled rotary embedding (linear, dynamic), as in vLLM. With
    YaRN some checkpoints state the scaled length there and some the original one, so the larger of both counts. A
    sliding window bounds what a layer attends to and not the length.
    """
    stated = config.get("max_position_embeddings")
    if type(stated) is not int or stated <= 0:
        return None
    # Transformers 5 writes rope_parameters, earlier versions rope_scaling; "type" is the older name of "rope_type".
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind, factor = scaling.get("rope_type", scaling.get("type", "default")), scaling.get("factor") or 1.0
    if kind in _SCALED_ALREADY:
        return stated
    original = scaling.get("original_max_position_embeddings") or stated
    return max(stated, int(original * factor)) if kind == "yarn" else int(stated * factor)
