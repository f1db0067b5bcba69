"""The MLP of a block in the engine: gate, up and down as two products, or a mixture of experts as grouped products.

A shared expert of a mixture is an MLP of the former kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from qerl.kernels.activations import Activation
from qerl.kernels.groups import GroupedLora, Groups
from qerl.kernels.operations import mixture_operations, operations
from qerl.layers.adapted_experts import AdaptedExperts
from qerl.layers.experts import ExpertLora, Experts, Float32Router
from qerl.layers.fused_linear import FusedLinear, fuse
from qerl.layers.grouped_linear import GroupedLinear, TorchGroupedLinear
from qerl.layers.grouped_lora import ExpertFactors, GroupedAdapters
from qerl.settings.base import ConfigError
from qerl.settings.rollout import Kernels

#: A product, or adapters that are apart from theirs.
Product = FusedLinear | GroupedLinear | GroupedAdapters


class Mlp(Protocol):
    """A block's MLP."""

    @property
    def linears(self) -> Sequence[Product]:
        """Its products, with adapters that are apart."""
        ...

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False) -> None:
        """Write the outputs of x [B, H] to out [B, H], or with `residual` add them. Both are contiguous."""
        ...


class DenseMlp:
    """down(activation(gate x) * up x)."""

    def __init__(self, gate_up: FusedLinear, down: FusedLinear, activation: Activation) -> None:
        self.linears: Sequence[Product] = (gate_up, down)
        self._gate_up, self._down = gate_up, down
        self._activation = activation

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False) -> None:
        """See `Mlp`."""
        inner = x.new_empty(len(x), self._gate_up.out_features // 2)
        self._gate_up(x, inner, activation=self._activation)
        self._down(inner, out, residual)


class MixtureMlp:
    """The weighted sum of the experts that a router in float32 chooses for each token.

    Nothing waits for the choice: a launch has room for any, so that CUDA graphs can have it.
    """

    def __init__(
        self, router: Float32Router, experts: Experts, dtype: torch.dtype, lora: ExpertLora | None = None
    ) -> None:
        assert router.normalised is not None  # the engine serves no family whose router has no softmax
        self._router, self._normalised = router, router.normalised
        self._products, self._count = experts.products(dtype), len(experts)
        products, lora = (self._products.gate_up, self._products.down), lora or ExpertLora()
        self._of_gate_up = _copies(lora.gate_up, products[0], dtype)
        self._of_down = _copies(lora.down, products[1], dtype)
        copies = (one for one in (self._of_gate_up, self._of_down) if one is not None)
        self.linears: Sequence[Product] = (*products, *copies)
        device = router.weight.device
        if device.type == "cuda" and any(isinstance(linear, TorchGroupedLinear) for linear in products):
            raise ConfigError(
                "the native engine has no grouped product for these experts: they must be NVFP4, MXFP4 or dense, in "
                "one format, and dense ones need widths that are multiples of 64"
            )
        self._mixture, self._operations = mixture_operations(device), operations(device)

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False) -> None:
        """See `Mlp`."""
        router, products = self._router, self._products
        scores = self._mixture.scores(x, router.weight, getattr(router, "bias", None))
        numbers, weights = self._mixture.route(scores, router.top_k, self._normalised)
        groups = self._mixture.group(numbers, self._count)
        clamped, width = products.clamped, products.gate_up.out_features
        inner = x.new_empty(groups.count, width if clamped else width // 2)
        products.gate_up(x, groups, inner, clamped is None, _added(self._of_gate_up, x, groups))
        if clamped:
            inner = self._operations.clamped_glu(inner, *clamped)
        y = x.new_empty(groups.count, out.shape[1])
        products.down(inner, groups, y, lora=_added(self._of_down, inner, groups))
        self._mixture.combine(y, weights, out, residual)


class SharedMixtureMlp:
    """A mixture beside a shared expert, which all tokens have, times the sigmoid of its gate."""

    def __init__(self, mixture: MixtureMlp, shared: DenseMlp, gate: nn.Linear) -> None:
        self.linears: Sequence[Product] = (*mixture.linears, *shared.linears)
        self._mixture, self._shared, self._gate = mixture, shared, gate

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False) -> None:
        """See `Mlp`."""
        shared = torch.empty_like(out)
        self._shared(x, shared)
        self._mixture(x, out, residual)
        out.addcmul_(shared, self._gate(x).sigmoid())


def _copies(factors: ExpertFactors | None, linear: GroupedLinear, dtype: torch.dtype) -> GroupedAdapters | None:
    return None if factors is None else GroupedAdapters(factors, linear.dense, dtype)


def _added(adapters: GroupedAdapters | None, x: Tensor, groups: Groups) -> GroupedLora | None:
    return None if adapters is None else adapters(x, groups)


def mlp_of(mlp: Any, activation: Activation, dtype: torch.dtype, kernels: Kernels) -> Mlp:
    """The MLP of a model's module, which shares its weights. Mixtures have silu, or gpt-oss's clamped gate."""
    parts = list(mlp.children())
    routers = [part for part in parts if isinstance(part, Float32Router)]
    experts = [part for part in parts if isinstance(part, (Experts, AdaptedExperts))]
    if not (routers and experts):
        return _dense_of(mlp, activation, dtype, kernels)
    mixture = _mixture_of(routers[0], experts[0], dtype)
    if not hasattr(mlp, "shared_expert"):
        return mixture
    return SharedMixtureMlp(mixture, _dense_of(mlp.shared_expert, activation, dtype, kernels), mlp.shared_expert_gate)


def _dense_of(mlp: Any, activation: Activation, dtype: torch.dtype, kernels: Kernels) -> DenseMlp:
    gate_up = fuse(projections(mlp, "gate_up_proj", "gate_proj", "up_proj"), dtype, gated=True, kernels=kernels)
    return DenseMlp(gate_up, fuse([mlp.down_proj], dtype, kernels=kernels), activation)


def _mixture_of(router: Float32Router, experts: Experts | AdaptedExperts, dtype: torch.dtype) -> MixtureMlp:
    if isinstance(experts, AdaptedExperts):
        return MixtureMlp(router, experts.base_layer, dtype, experts.lora)
    return MixtureMlp(router, experts, dtype)


def projections(module: Any, fused: str, *parts: str) -> list[Any]:
    """The layer that a checkpoint has fused, as in Phi-3, or its parts."""
    return [getattr(module, name) for name in ((fused,) if hasattr(module, fused) else parts)]
