"""The parts of a layer under PEFT's LoRA, and the adapters of layers that run as one product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from qerl.layers.packed_linear import PackedLinear

#: PEFT's name of the policy's adapter.
POLICY_ADAPTER = "default"


@dataclass(frozen=True)
class Lora:
    """`up` [N, R] times `down` [R, K] times `scale` is added to a weight [N, K]."""

    down: Tensor
    up: Tensor
    scale: float


@dataclass(frozen=True)
class Adapted:
    """A base layer with the policy's adapter, if it has one."""

    base: nn.Linear | PackedLinear
    lora: Lora | None


def unwrap(layer: nn.Module) -> Adapted:
    """The parts of a linear layer. Raises TypeError for another kind of layer, and ValueError for a variant of LoRA."""
    lora = None
    if isinstance(layer, LoraLayer):
        if POLICY_ADAPTER in layer.lora_variant:
            raise ValueError("the native engine applies plain LoRA only; use engine=vllm, or native on a CPU")
        if POLICY_ADAPTER in layer.lora_A:
            down, up = (part.get_parameter(f"{POLICY_ADAPTER}.weight") for part in (layer.lora_A, layer.lora_B))
            lora = Lora(down, up, float(layer.scaling[POLICY_ADAPTER]))
        layer = layer.get_base_layer()
    if not isinstance(layer, (nn.Linear, PackedLinear)):
        raise TypeError(f"{type(layer).__name__} is no linear layer that the native engine knows; use engine=vllm")
    return Adapted(layer, lora)


class StackedAdapters:
    """Adapters of layers with one input: `down` [R, K], and `up` [N, R], whose blocks lie on the diagonal.

    R is the sum of the ranks; the adapters' scale is folded into `up`. Both are in `dtype`, at addresses that stay.
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
        """Copy the adapters as they are now."""
        if self._loras:
            scaled = torch._foreach_mul([lora.up for lora in self._loras], [lora.scale for lora in self._loras])
            torch._foreach_copy_(self._downs + self._ups, [lora.down for lora in self._loras] + list(scaled))
