"""Dropout of a model's own, which updates don't support: its modules, calls of functions, and attention's."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from qerl.layers.empty_model import StructureError


class Dropouts(TorchFunctionMode):
    """Notes the probability of each dropout that a forward pass computes, in training or not."""

    def __init__(self) -> None:
        super().__init__()
        self.probabilities: set[float] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.dropout:
            self.probabilities.add(kwargs["p"])
        return func(*args, **kwargs)


def check_dropout(lm: nn.Module, kind: str) -> None:
    """Raise `StructureError` for a module of dropout, for one that drops layers, as BioGPT's may, and for jitter.

    Mixtral's jitter multiplies what a mixture reads by random numbers in training. `check_calls_of_dropout` finds
    dropout by a function.
    """
    for name, module in lm.named_modules():
        probability = module.p if isinstance(module, nn.Dropout) else getattr(module, "layerdrop", 0.0)
        if probability > 0:
            raise StructureError(
                f"model_type={kind!r} has dropout of {probability} in {name}, which updates don't support; set its "
                "probability to 0 in config.json"
            )
        if (jitter := getattr(module, "jitter_noise", 0.0)) > 0:
            raise StructureError(
                f"model_type={kind!r} has noise of {jitter} in {name}, which updates don't support; set "
                "router_jitter_noise to 0 in config.json"
            )


def check_calls_of_dropout(probabilities: set[float], config: PreTrainedConfig) -> None:
    """Raise `StructureError` if one of the probabilities that `Dropouts` has noted isn't 0."""
    values = config.to_dict().items()
    keys = [key for key, value in values if "drop" in key and isinstance(value, float) and value > 0]
    if max(probabilities, default=0) > 0:
        raise StructureError(
            f"model_type={config.model_type!r} has dropout of {max(probabilities)} outside of attention, which updates "
            f"don't support; set {' and '.join(keys)} to 0 in config.json"
        )


def attention_dropout(attention: nn.Module) -> float:
    """The probability that a module of attention passes on. Persimmon has a module of that name, and GLM takes null."""
    dropout = getattr(attention, "attention_dropout", 0.0)
    return dropout if isinstance(dropout, float) else 0.0
