"""The causal language model of a configuration without weights, on the meta device."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, __version__
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qerl.layers.delta_net import pack_delta_nets
from qerl.layers.experts import split_experts
from qerl.settings.base import UserError

#: What transformers raises for values of config.json that don't fit. It checks some of them, and computes with others.
MISFITS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


class StructureError(UserError):
    """A model whose structure this project doesn't handle. The message is one sentence for the user."""


def rope_types(config: PreTrainedConfig) -> set[str]:
    """The types of a model's rotary positions. Some models have one for each kind of attention."""
    rope = getattr(config, "rope_parameters", None) or {}
    return {str(one["rope_type"]) for one in (rope, *rope.values()) if isinstance(one, dict) and one.get("rope_type")}


def empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """The causal LM on the meta device, without transformers' quantization and stacks of experts.

    Its delta nets compute packed rows.
    """
    if unknown := rope_types(config) - {*ROPE_INIT_FUNCTIONS, "default"}:
        raise StructureError(
            f"transformers {__version__} has no rotary positions of rope_type={sorted(unknown)[0]!r}; correct "
            "config.json, or install a version that has them"
        )
    config = deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise StructureError(f"transformers has no causal language model for model_type={config.model_type!r}")
    try:
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except MISFITS as error:
        raise StructureError(
            f"transformers makes no model of model_type={config.model_type!r} from the values of config.json "
            f"({type(error).__name__}: {error}); correct them"
        ) from error
    split_experts(lm)
    pack_delta_nets(lm)
    return lm
