"""The MLP of a block in the engine: gate, up and down as two products, or a mixture of experts as grouped products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from qerl.kernels.operations import mixture_operations, operations
from qerl.layers.experts import Experts, Float32Router
from qerl.layers.fused_linear import FusedLinear, fuse
from qerl.layers.grouped_linear import GroupedLinear, TorchGroupedLinear
from qerl.settings.base import ConfigError
from qerl.settings.rollout import Kernels


class Mlp(Protocol):
    """A block's MLP."""

    @property
    def linears(self) -> Sequence[FusedLinear | GroupedLinear]:
        """Its products."""
        ...

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False) -> None:
        """Write the outputs of x [B, H] to out [B, H], or with `residual` add them. Both are contiguous."""
        ...


class DenseMlp:
    """down(silu(gate x) * up x); with `geglu`, which takes gate and up [B, 2 I], down(gelu(gate x) * up x)."""

    def __init__(self, gate_up: FusedLinear, down: FusedLinear, geglu: Callable[[Tensor], Tensor] | None) -> None:
        self.linears: Sequence[FusedLinear | GroupedLinear] = (gate_up, down)
        self._gate_up, self._down = gate_up, down
        self._geglu = geglu

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False) -> None:
        """See `Mlp`."""
        self._down(self._gated(x), out, residual)

    def _gated(self, x: Tensor) -> Tensor:
        """The hidden features [B, I] of x [B, H]."""
        width = self._gate_up.out_features
        if self._geglu is not None:
            both = x.new_empty(len(x), width)
            self._gate_up(x, both)
            return self._geglu(both)
        gated = x.new_empty(len(x), width // 2)
        self._gate_up(x, gated, silu=True)
        return gated


class MixtureMlp:
    """The weighted sum of the experts that a router in float32 chooses for each token.

    Nothing waits for the choice: a launch has room for any, so that CUDA graphs can have it.
    """

    def __init__(self, router: Float32Router, experts: Experts, dtype: torch.dtype) -> None:
        self._router, self._products, self._count = router, experts.products(dtype), len(experts)
        self.linears: Sequence[FusedLinear | GroupedLinear] = (self._products.gate_up, self._products.down)
        device = router.weight.device
        if device.type == "cuda" and any(isinstance(linear, TorchGroupedLinear) for linear in self.linears):
            raise ConfigError(
                "the native engine has no grouped product for these experts: they must be NVFP4, MXFP4 or dense, in "
                "one format, and dense ones need widths that are multiples of 64"
            )
        self._mixture, self._operations = mixture_operations(device), operations(device)

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False) -> None:
        """See `Mlp`."""
        router, products = self._router, self._products
        numbers, weights = self._mixture.route(router.scores(x), router.top_k, router.normalised)
        groups = self._mixture.group(numbers, self._count)
        clamped, width = products.clamped, products.gate_up.out_features
        inner = x.new_empty(groups.count, width if clamped else width // 2)
        products.gate_up(x, groups, inner, silu=clamped is None)
        if clamped:
            inner = self._operations.clamped_glu(inner, *clamped)
        y = x.new_empty(groups.count, out.shape[1])
        products.down(inner, groups, y)
        self._mixture.combine(y, weights, out, residual)


def mlp_of(
    mlp: Any, geglu: Callable[[Tensor], Tensor] | None, dtype: torch.dtype, kernels: Kernels
) -> DenseMlp | MixtureMlp:
    """The MLP of a model's module, which shares its weights; without `geglu` its activation is silu."""
    parts = list(mlp.children())
    routers = [part for part in parts if isinstance(part, Float32Router)]
    experts = [part for part in parts if isinstance(part, Experts)]
    if routers and experts:
        return MixtureMlp(routers[0], experts[0], dtype)
    both, gated = projections(mlp, "gate_up_proj", "gate_proj", "up_proj"), geglu is None
    gate_up = fuse(both, dtype, gated=gated, kernels=kernels)
    return DenseMlp(gate_up, fuse([mlp.down_proj], dtype, kernels=kernels), geglu)


def projections(module: Any, fused: str, *parts: str) -> list[Any]:
    """The layer that a checkpoint has fused, as in Phi-3, or its parts."""
    return [getattr(module, name) for name in ((fused,) if hasattr(module, fused) else parts)]
