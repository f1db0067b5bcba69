"""The tensors that a sampler with its own copy of the weights must receive: the present adapter and norms."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor

from qerl.layers import noisy_norm
from qerl.layers.adapters import POLICY_ADAPTER
from qerl.layers.noisy_norm import NoisyRMSNorm
from qerl.layers.structure import structure_of
from qerl.policy.policy import Policy

_PREFIX = "base_model.model."


def adapter_config(policy: Policy) -> LoraConfig | None:
    """PEFT's configuration of the policy's adapter, or None without an adapter."""
    if policy.peft is None:
        return None
    config = policy.peft.peft_config[POLICY_ADAPTER]
    assert isinstance(config, LoraConfig)
    return config


def lora_tensors(policy: Policy, dtype: torch.dtype) -> dict[str, Tensor]:
    """A [rank, in] and B [out, rank] of every adapted layer by PEFT's name, in `dtype`.

    B is multiplied by PEFT's factor alpha / rank, in float32, and rounded once.
    """
    tensors = {}
    for name, layer in policy.lm.named_modules():
        if isinstance(layer, LoraLayer):
            adapter: Any = layer
            a, b = adapter.lora_A[POLICY_ADAPTER].weight.detach(), adapter.lora_B[POLICY_ADAPTER].weight.detach()
            tensors[f"{_PREFIX}{name}.lora_A.weight"] = a.to(dtype)
            tensors[f"{_PREFIX}{name}.lora_B.weight"] = (b.float() * adapter.scaling[POLICY_ADAPTER]).to(dtype)
    return tensors


def norm_weights(policy: Policy) -> dict[str, Tensor]:
    """`w + z` [features], float32, for both norms of every block, by the weight's name in the base's checkpoint."""
    names = {place: name for name, place in structure_of(policy.lm.config).noisy_norms().items()}
    return {
        f"{names[norm.layer, norm.role]}.weight": norm.weight.detach().float() + norm.noise
        for norm in noisy_norms(policy)
    }


def noisy_norms(policy: Policy) -> list[NoisyRMSNorm]:
    """The active norms: PEFT's trained copies where there are any."""
    return [norms[-1] for norms in noisy_norm.noisy_norms(policy.lm).values()]
