"""The base layer and adapter of a PEFT layer, and the stacked adapters of layers that run as one product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from qerl.layers.packed_linear import PackedLinear
from qerl.settings.base import ConfigError

#: The policy's adapter name in PEFT.
POLICY_ADAPTER = "default"


@dataclass(frozen=True)
class Lora:
    """An adapter that adds `up` [N, R] times `down` [R, K] times `scale` to a weight [N, K]."""

    down: Tensor
    up: Tensor
    scale: float


@dataclass(frozen=True)
class Adapted:
    """A base layer with the policy's adapter, if it has one."""

    base: nn.Linear | PackedLinear
    lora: Lora | None


def unwrap(layer: nn.Module) -> Adapted:
    """The base and adapter of a linear layer. Raises `ConfigError` for another layer, and for a LoRA variant."""
    lora = None
    if isinstance(layer, LoraLayer):
        if POLICY_ADAPTER in layer.lora_variant or layer.lora_bias.get(POLICY_ADAPTER):
            raise ConfigError("the native engine supports only plain LoRA; use engine=vllm, or native on a CPU")
        if POLICY_ADAPTER in layer.lora_A:
            down, up = (part.get_parameter(f"{POLICY_ADAPTER}.weight") for part in (layer.lora_A, layer.lora_B))
            lora = Lora(down, up, float(layer.scaling[POLICY_ADAPTER]))
        layer = layer.get_base_layer()
    if not isinstance(layer, (nn.Linear, PackedLinear)):
        raise ConfigError(f"the native engine doesn't support layers of {type(layer).__name__}; use engine=vllm")
    return Adapted(layer, lora)


def embedding_weight(embedding: Any) -> Tensor:
    """The weight whose rows are the tokens' vectors. Raises `ConfigError` for an embedding with LoRA."""
    if isinstance(embedding, LoraLayer):
        raise ConfigError("the native engine doesn't support LoRA of the embedding; merge the adapter by PEFT")
    weight: Tensor = embedding.weight
    return weight


class StackedAdapters:
    """Adapters of layers with the same input: `down` [R, K], and block-diagonal `up` [N, R].

    R is the sum of the ranks; `up` includes the adapters' scales. Both are in `dtype`, and their addresses never
    change.
    """

    def __init__(self, layers: Sequence[Adapted], dtype: torch.dtype) -> None:
        adapters = [(layer.lora, layer.base.out_features) for layer in layers]
        self._loras = [lora for lora, _ in adapters if lora is not None]
        self.rank = sum(len(lora.down) for lora in self._loras)
        rows, columns = sum(width for _, width in adapters), layers[0].base.in_features
        device = self._loras[0].down.device if self._loras else torch.device("cpu")
        self.down = torch.zeros(self.rank, columns, dtype=dtype, device=device)
        self.up = torch.zeros(rows, self.rank, dtype=dtype, device=device)
        self._downs: list[Tensor] = []
        self._ups: list[Tensor] = []
        row = rank = 0
        for lora, width in adapters:
            if lora is not None:
                self._downs.append(self.down[rank : rank + len(lora.down)])
                self._ups.append(self.up[row : row + width, rank : rank + len(lora.down)])
                rank += len(lora.down)
            row += width

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the present adapters."""
        if self._loras:
            scaled = torch._foreach_mul([lora.up for lora in self._loras], [lora.scale for lora in self._loras])
            torch._foreach_copy_(self._downs + self._ups, [lora.down for lora in self._loras] + list(scaled))
