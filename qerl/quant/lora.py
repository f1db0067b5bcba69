"""PEFT's LoRA with a lean forward pass, on dense layers and on `PackedLinear`: parameters and files are PEFT's own."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qerl.quant.linear import PackedLinear


class _LoraProduct(torch.autograd.Function):
    """x W^T + b + s (d A^T) B^T over a frozen base, d being x or x after dropout: rows [M, in] to [M, out].

    What the adapter adds is written first and the base's product is added to it where it lies, in the product itself;
    likewise for the gradient of x. Nothing as large as the input or the output is written a second time or kept beside
    it. A and B count in the dtype of x, which their gradients are rounded to, as under autocast.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        a: Tensor,
        b: Tensor,
        scaling: float,
        base: nn.Linear | PackedLinear,
    ) -> Tensor:
        shrunk = ((x if dropped is None else dropped) @ a.to(x.dtype).T).mul_(scaling)
        expand = b.to(x.dtype).T
        out = shrunk @ expand if base.bias is None else torch.addmm(base.bias.to(x.dtype), shrunk, expand)
        ctx.save_for_backward(x, dropped, a, b, shrunk)
        ctx.scaling, ctx.base = scaling, base
        return out.addmm_(x, frozen_weight(base, x.dtype).T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, dropped, a, b, shrunk = ctx.saved_tensors
        weight = lambda: frozen_weight(ctx.base, grad.dtype)  # noqa: E731
        of_x, of_dropped, of_a, of_b, *_ = ctx.needs_input_grad
        grad_shrunk = (grad @ b.to(grad.dtype)).mul_(ctx.scaling)
        grad_a = (grad_shrunk.T @ (x if dropped is None else dropped)).to(a.dtype) if of_a else None
        grad_b = (grad.T @ shrunk).to(b.dtype) if of_b else None
        through_a = grad_shrunk @ a.to(grad.dtype) if of_x or of_dropped else None
        if dropped is not None:
            return grad @ weight() if of_x else None, through_a, grad_a, grad_b, None, None
        grad_x = None if through_a is None else through_a.addmm_(grad, weight())
        return grad_x, None, grad_a, grad_b, None, None


def frozen_weight(base: nn.Linear | PackedLinear, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] of the layer under an adapter, unpacked if need be."""
    return base.dense_weight(dtype) if isinstance(base, PackedLinear) else base.weight.to(dtype)


class LeanLoraLinear(LoraLinear):
    """LoRA whose forward and backward passes keep and write no more than they must.

    PEFT's casts the input to the adapter's float32, which autocast casts back: each layer keeps a copy, where q, k and
    v could share theirs. And it makes B's output, scales it and adds it, three tensors as large as the layer's output.
    Inputs that autocast doesn't bring to one dtype with the adapter take PEFT's way, and so do several adapters at once
    and a base that is trained itself.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[..., in_features] to [..., out_features], in the dtype of the base's output."""
        if args or kwargs or not self._is_plain(x):
            return super().forward(x, *args, **kwargs)
        (name,), rows = self.active_adapters, x.flatten(0, -2)
        if torch.is_autocast_enabled(x.device.type):
            rows = rows.to(torch.get_autocast_dtype(x.device.type))
        dropout = self.lora_dropout[name]
        dropped = dropout(rows) if self.training and not isinstance(dropout, nn.Identity) else None
        a, b = (adapter[name].get_parameter("weight") for adapter in (self.lora_A, self.lora_B))
        result: Tensor = _LoraProduct.apply(rows, dropped, a, b, self.scaling[name], self.base_layer)
        return result.unflatten(0, x.shape[:-1])

    def _is_plain(self, x: Tensor) -> bool:
        if self.disable_adapters or self.merged or self.lora_variant or len(self.active_adapters) != 1:
            return False
        trained = any(parameter.requires_grad for parameter in self.base_layer.parameters())
        mixed = x.dtype != torch.float32 and not torch.is_autocast_enabled(x.device.type)
        return self.active_adapters[0] in self.lora_A and not trained and not mixed


class PackedLoraLinear(LeanLoraLinear):
    """LoRA around a `PackedLinear`; A and B are trained in float32, the result has the dtype of the base's output."""

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Plain LoRA only: the variants (DoRA, ...) read the dense weight."""
        return {(): None}

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> NoReturn:
        """Packed weights take no update: always an error."""
        raise ValueError(
            f"can't merge an adapter into {self.get_base_layer().weights_format} weights without loss; keep it as an "
            "adapter, or merge it into the dense model"
        )

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        assert isinstance(module, PackedLinear)
        return module.in_features, module.out_features


def register_lora(config: LoraConfig) -> LoraConfig:
    """Let `config` target `PackedLinear` layers beside dense ones; returns it.

    Raises ValueError for an initialisation that reads the dense weight.
    """
    if config.init_lora_weights not in (True, False, "gaussian"):
        raise ValueError(
            f"init_lora_weights={config.init_lora_weights!r} reads the dense weight, which packed layers don't keep; "
            "use True or 'gaussian'"
        )
    config._register_custom_module({PackedLinear: PackedLoraLinear, nn.Linear: LeanLoraLinear})
    return config
