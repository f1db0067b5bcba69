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
from qerl.layers.structure import structure_of
from qerl.random_models.weights import fill_model, random_weight

#: Kinds of models whose published files have packed experts alone.
_EXPERTS_ALONE = ("gpt_oss",)


def published_config(size: str) -> PreTrainedConfig:
    """The configuration of a published shape."""
    return AutoConfig.for_model(**PUBLISHED[size])


def published_model(config: PreTrainedConfig, weights: str, device: torch.device) -> PreTrainedModel:
    """A model of the configuration, in bfloat16 or with the layers packed that `quantize` packs.

    Layers are made and packed one by one, as a dense copy of all may not fit. Only a model with buffers of its own,
    such as Gemma's scale of embeddings, is made whole first.
    """
    lm: Any = empty_model(config, torch.bfloat16)
    structure = structure_of(config)
    packed = [name for name in structure.packed_layers() if weights != "bf16"]
    if structure.experts and config.model_type in _EXPERTS_ALONE:
        packed = [name for name in packed if ".experts." in name]
    if any("rotary_emb" not in name for name, _ in lm.named_buffers()):
        with torch.device(device):
            lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name in packed:
        lm.set_submodule(name, _packed(lm.get_submodule(name), weights, device, ".experts." not in name))
    if any(parameter.is_meta for parameter in lm.parameters()):
        fill_model(lm, device)
    for module in lm.modules():
        if isinstance(module, Float32Router):
            module.float()
    return lm


def _packed(layer: nn.Module, weights: str, device: torch.device, keepable: bool) -> PackedLinear:
    """A packed layer of the same shape, with the layer's weights where it has some."""
    assert isinstance(layer, nn.Linear)
    dense = random_weight(layer.weight.shape, device) if layer.weight.is_meta else layer.weight.data
    bias = None if layer.bias is None else torch.zeros(layer.out_features, dtype=torch.bfloat16, device=device)
    made = PackedLinear.from_packed(quantize(dense, weights), bias)
    made.keepable = keepable
    return made
