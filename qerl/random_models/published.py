"""Models of published shapes with random weights: any decoder whose structure the package reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from qerl.checkpoints.published import EXPERTS_ALONE, PUBLISHED
from qerl.formats import words
from qerl.formats.codecs import quantize, split_rows
from qerl.layers.empty_model import empty_model
from qerl.layers.experts import Float32Router
from qerl.layers.packed_linear import PackedLinear
from qerl.layers.structure import structure_of
from qerl.random_models.weights import fill_model, random_weight

_EXPERT = re.compile(r"\.experts\.\d+\.")


def published_config(size: str) -> PreTrainedConfig:
    """The configuration of a published shape."""
    return AutoConfig.for_model(**PUBLISHED[size])


def published_model(
    config: PreTrainedConfig, weights: str, device: torch.device, pack_delta_nets: bool = False
) -> PreTrainedModel:
    """A model of the configuration, in bfloat16 or with the layers packed that `quantize` packs.

    Layers are made and packed one after the other, as a dense copy of all may not fit. Only a model with buffers of
    its own, such as Gemma's scale of embeddings, is made whole first.
    """
    lm: Any = empty_model(config, torch.bfloat16)
    structure = structure_of(config)
    packed = [name for name in structure.packed_layers(pack_delta_nets) if weights != "bf16"]
    if structure.experts and config.model_type in EXPERTS_ALONE:
        packed = [name for name in packed if ".experts." in name]
    if any("rotary_emb" not in name for name, _ in lm.named_buffers()):
        with torch.device(device):
            lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for names in _alike(packed) if weights in words.FORMATS else ([name] for name in packed):
        _pack(lm, names, weights, device)
    if any(parameter.is_meta for parameter in lm.parameters()):
        fill_model(lm, device)
    for module in lm.modules():
        if isinstance(module, Float32Router):
            module.float()
    return lm


def _alike(names: Sequence[str]) -> Iterator[list[str]]:
    """The same layer of all experts of a block together, and every other layer alone."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_EXPERT.sub(".experts.", name), []).append(name)
    yield from groups.values()


def _pack(lm: nn.Module, names: Sequence[str], weights: str, device: torch.device) -> None:
    """Replace layers of one shape by packed ones, with their weights where they have some.

    They are quantized as one weight, because thousands of experts take a minute one by one.
    """
    layers = [cast(nn.Linear, lm.get_submodule(name)) for name in names]
    rows, columns = layers[0].weight.shape
    if layers[0].weight.is_meta:
        dense = random_weight((len(layers) * rows, columns), device)
    else:
        dense = torch.cat([layer.weight.data for layer in layers])
    parts = [quantize(dense, weights)] if len(layers) == 1 else split_rows(quantize(dense, weights), rows)
    for name, layer, part in zip(names, layers, parts, strict=True):
        bias = None if layer.bias is None else torch.zeros(rows, dtype=torch.bfloat16, device=device)
        made = PackedLinear.from_packed(part, bias)
        made.keepable = ".experts." not in name
        lm.set_submodule(name, made)
