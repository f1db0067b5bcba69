"""LoRA on the experts of a mixture, of which each has an adapter of its own for each projection.

An adapter of a projection is one tensor A [experts, r, in] and one B [experts, out, r], not two matrices for each of
thousands of layers. `qerl.policy.expert_adapters` stores them in PEFT's layouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from qerl.layers.adapters import POLICY_ADAPTER
from qerl.layers.experts import ExpertLora, Experts
from qerl.layers.grouped_linear import Layer, device_of
from qerl.layers.grouped_lora import ExpertFactors


class AdaptedExperts(nn.Module, BaseTunerLayer):
    """Frozen `Experts` with the policy's adapter on `projections`, such as "up_proj"; B is 0.

    PEFT enables, disables and freezes it with the adapters of other layers.
    """

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, base: Experts, projections: Sequence[str], rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer = base
        self.projections = tuple(projections)
        self.scale = alpha / rank
        downs, ups = nn.ParameterDict(), nn.ParameterDict()
        for name in projections:
            downs[name], ups[name] = _fresh(base, name, rank)
        self.lora_A = nn.ModuleDict({POLICY_ADAPTER: downs})
        self.lora_B = nn.ModuleDict({POLICY_ADAPTER: ups})

    @property
    def lora(self) -> ExpertLora:
        """The adapter, even while it is disabled."""
        both = ("gate_up_proj",) if self.in_stacks else ("gate_proj", "up_proj")
        return ExpertLora(self._factors(*both), self._factors("down_proj"))

    @property
    def in_stacks(self) -> bool:
        """Whether each expert has one layer for gate and up, as in gpt-oss, whose files have stacks of experts."""
        return hasattr(self.base_layer[0], "gate_up_proj")

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See `Experts.forward`."""
        enabled = not self.disable_adapters and POLICY_ADAPTER in self.active_adapters
        out: Tensor = self.base_layer(hidden, chosen, weights, self.lora if enabled else None)
        return out

    def adapter(self, side: str, projection: str) -> nn.Parameter:
        """A ("A") [experts, r, in] or B ("B") [experts, out, r] of a projection."""
        return self.get_parameter(f"lora_{side}.{POLICY_ADAPTER}.{projection}")

    def _factors(self, *projections: str) -> ExpertFactors | None:
        """The adapters of projections that read the same input: all of them have one, or none."""
        if projections[0] not in self.projections:
            return None
        downs, ups = ([self.adapter(side, name) for name in projections] for side in "AB")
        return ExpertFactors(downs, ups, self.scale)


def _fresh(base: Experts, projection: str, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
    """A as PEFT draws it for a linear layer, and B = 0, both float32."""
    layer: Layer = base[0].get_submodule(projection)  # type: ignore[assignment]
    device, count = device_of(layer), len(base)
    down = torch.empty(count * rank, layer.in_features, device=device)
    nn.init.kaiming_uniform_(down, a=math.sqrt(5))
    up = torch.zeros(count, layer.out_features, rank, device=device)
    return nn.Parameter(down.view(count, rank, -1)), nn.Parameter(up)


def adapt_experts(model: nn.Module, projections: Sequence[str], rank: int, alpha: float) -> None:
    """Give the experts of all blocks an adapter."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Experts):
            model.set_submodule(name, AdaptedExperts(module, projections, rank, alpha))


def adapted_experts(model: nn.Module) -> dict[str, AdaptedExperts]:
    """The experts with adapters, by their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedExperts)}
