"""The tensors that a sampler with its own copy of the weights must receive: the present adapter and norms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor

from qerl.layers.adapters import POLICY_ADAPTER
from qerl.layers.noisy_norm import ROLES, NoisyRMSNorm
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
    return {
        f"model.layers.{index}.{role}.weight": norm.weight.detach().float() + norm.noise
        for index, role, norm in _active_norms(policy.lm)
    }


def noisy_norms(policy: Policy) -> list[NoisyRMSNorm]:
    """The active norms: PEFT's trained copies where there are any."""
    return [norm for _, _, norm in _active_norms(policy.lm)]


def _active_norms(lm: Any) -> Iterator[tuple[int, str, NoisyRMSNorm]]:
    for index, layer in enumerate(lm.model.layers):
        for role in ROLES:
            norm = getattr(layer, role)
            if isinstance(norm, ModulesToSaveWrapper):
                norm = norm.modules_to_save[POLICY_ADAPTER]
            yield index, role, norm
