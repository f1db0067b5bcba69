"""Models of published shapes with random weights: any decoder whose structure the package reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from qerl.checkpoints.published import PUBLISHED
from qerl.formats.codecs import quantize
from qerl.layers.empty_model import empty_model
from qerl.layers.experts import Float32Router
from qerl.layers.packed_linear import PackedLinear
from qerl.layers.structure import Structure, structure_of
from qerl.random_models.weights import fill_model, random_weight

#: Kinds of models whose published files have packed experts alone.
_EXPERTS_ALONE = ("gpt_oss",)


def published_config(size: str) -> PreTrainedConfig:
    """The configuration of a published shape."""
    return AutoConfig.for_model(**PUBLISHED[size])


def published_model(config: PreTrainedConfig, weights: str, device: torch.device) -> PreTrainedModel:
    """A model of the configuration, in bfloat16 or with the layers packed that `quantize` packs."""
    structure = structure_of(config)
    packed = structure.packed_layers() if weights != "bf16" else ()
    if structure.experts:
        return _mixture(config, structure, weights, device)
    with torch.device(device):
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name in packed:
        lm.set_submodule(name, PackedLinear.from_packed(quantize(lm.get_parameter(f"{name}.weight").data, weights)))
    return lm


def _mixture(config: PreTrainedConfig, structure: Structure, weights: str, device: torch.device) -> PreTrainedModel:
    """A mixture whose experts are packed one by one, as a dense copy of all wouldn't fit."""
    lm: Any = empty_model(config, torch.bfloat16)
    for name in structure.packed_layers() if weights != "bf16" else ():
        if ".experts." in name or config.model_type not in _EXPERTS_ALONE:
            lm.set_submodule(name, _packed(lm.get_submodule(name), weights, device, ".experts." not in name))
    fill_model(lm, device)
    for module in lm.modules():
        if isinstance(module, Float32Router):
            module.float()
    return lm


def _packed(layer: nn.Module, weights: str, device: torch.device, keepable: bool) -> PackedLinear:
    assert isinstance(layer, nn.Linear)
    bias = None if layer.bias is None else torch.zeros(layer.out_features, dtype=torch.bfloat16, device=device)
    made = PackedLinear.from_packed(
        quantize(random_weight((layer.out_features, layer.in_features), device), weights), bias
    )
    made.keepable = keepable
    return made
