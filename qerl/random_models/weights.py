"""Random weights for models that have none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

#: Standard deviation of the weights, with which logits are similar to a trained model's and hidden states neither
#: vanish nor explode.
STD = 0.02


def fill_model(lm: PreTrainedModel, device: torch.device) -> None:
    """Give `lm` frozen random weights where it still has none."""
    for module in lm.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                setattr(module, name, nn.Parameter(random_weight(parameter.shape, device), requires_grad=False))
    lm.model.rotary_emb = type(lm.model.rotary_emb)(lm.config).to(device)
    lm.tie_weights()


def random_weight(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Normal bfloat16 values; a vector, which is a norm's weight, has ones."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    return torch.randn(shape, device=device).mul_(STD).bfloat16()  # in place: a head needs gigabytes in float32
