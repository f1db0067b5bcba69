"""PEFT's LoRA with leaner forward and backward passes, and a dropout that doesn't depend on the packing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qerl.models.linear import Layer, PackedLinear, weight_of

# LoRA dropout whose mask depends only on the sequence, not on the packing or the process.

#: The random key of a piece of a packed row: numbers that no other piece of the run has.
Key = tuple[int, ...]


class KeyedDropout(nn.Module):
    """Dropout over packed rows. In training mode, call `set_keys` with the row's pieces first."""

    def __init__(self, p: float, layer: int) -> None:
        super().__init__()
        self.p = p
        self.layer = layer
        self.keys: Sequence[Key] = ()
        self.lengths: Sequence[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to x [1, L, features]; kept values are divided by 1 - p."""
        if not self.training:
            return x
        if x.shape[:-1] != (1, sum(self.lengths)):
            raise RuntimeError(f"dropout has keys of {sum(self.lengths)} tokens for an input {list(x.shape)}")
        mask = torch.cat([self._mask(*piece, x) for piece in zip(self.keys, self.lengths, strict=True)])
        return (x * mask) / (1 - self.p)

    def _mask(self, key: Key, tokens: int, x: Tensor) -> Tensor:
        """The kept values as bool [tokens, features], a function of the key alone."""
        seed = np.random.SeedSequence([*key, self.layer]).generate_state(1, np.uint64)[0]
        generator = torch.Generator(x.device).manual_seed(int(seed))
        return torch.rand(tokens, x.shape[-1], generator=generator, device=x.device) >= self.p


def key_dropout(model: nn.Module, adapter: str) -> None:
    """Replace an adapter's dropout, for which PEFT uses torch's global generator, by `KeyedDropout`."""
    layers = (module for module in model.modules() if isinstance(module, LoraLayer))
    for number, layer in enumerate(layers):
        plain = layer.lora_dropout[adapter]
        if isinstance(plain, nn.Dropout):
            layer.lora_dropout[adapter] = KeyedDropout(plain.p, number)


def dropouts(model: nn.Module) -> list[KeyedDropout]:
    """The dropouts of a model's adapters; none if they drop nothing."""
    return [module for module in model.modules() if isinstance(module, KeyedDropout)]


def set_keys(modules: Iterable[KeyedDropout], keys: Sequence[Key], lengths: Sequence[int]) -> None:
    """Set the keys and lengths of the next row's pieces. They stay until the next call, also in the backward pass."""
    for module in modules:
        module.keys, module.lengths = keys, lengths


# PEFT's LoRA with leaner forward and backward passes, on dense layers and `PackedLinear`, in PEFT's file format.


class _Frozen(NamedTuple):
    """The base layer of an adapter, and the adapter's scale."""

    base: Layer
    scale: float


@dataclass(frozen=True)
class _Operands:
    """What the products of layers with the same input read."""

    layers: Sequence[_Frozen]
    down: Tensor
    """All A stacked, [ranks, in]."""
    ups: Sequence[Tensor]
    """s B of each layer, [out, rank]."""

    @classmethod
    def of(cls, layers: Sequence[_Frozen], adapters: Sequence[Tensor], dtype: torch.dtype) -> _Operands:
        """Cast A and B of each layer, in order in `adapters`, to `dtype`."""
        ups = [(up * layer.scale).to(dtype) for layer, up in zip(layers, adapters[1::2], strict=True)]
        downs = [down.to(dtype) for down in adapters[::2]]
        # One alone isn't copied, which on a CPU would take about as long as a small layer.
        return cls(layers, downs[0] if len(downs) == 1 else torch.cat(downs), ups)

    def parts(self, joint: Tensor, dim: int = 1) -> Sequence[Tensor]:
        """Each layer's part of a tensor with concatenated ranks."""
        return [joint] if len(self.ups) == 1 else joint.split([up.shape[1] for up in self.ups], dim)

    def products(self, x: Tensor, dropped: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The products with A [M, ranks], and the layers' outputs [M, out]."""
        shrunk = (x if dropped is None else dropped) @ self.down.T
        # The adapter's product is written first, and the base's is added in place, as are the terms of x's gradient. So
        # no tensor as large as the input or an output is written twice or kept in addition.
        outs = []
        for layer, up, part in zip(self.layers, self.ups, self.parts(shrunk), strict=True):
            bias = layer.base.bias
            out = part @ up.T if bias is None else torch.addmm(bias.to(x.dtype), part, up.T)
            outs.append(out.addmm_(x, weight_of(layer.base, x.dtype).T))
        return shrunk, tuple(outs)

    def add_bases(self, grads: Sequence[Tensor], grad_x: Tensor) -> Tensor:
        """Add the base layers' share of the gradient of x [M, in] in place, from the outputs' gradients."""
        for layer, grad in zip(self.layers, grads, strict=True):
            grad_x.addmm_(grad, weight_of(layer.base, grad.dtype))
        return grad_x


class SharedCasts:
    """Operands of adapters that don't change for a while, which all passes read.

    These are the adapters in the 16-bit dtype of passes. With `every`, they are also those that passes read as they
    are, and large ones.
    """

    # In a small policy every fourth kernel of an update's pass would otherwise be a cast, and the operands of each step
    # would take an eighth of a decode step on a CPU. Larger adapters are cast in each pass of an update, as their casts
    # would take memory.
    #: The most elements of the adapters of layers with the same input. Those of an MLP of 7B have more.
    MOST = 2**18

    def __init__(self, model: nn.Module, every: bool = False) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, LeanLoraLinear)]
        self.every = every
        self._operands: dict[Any, tuple[_Operands, Sequence[Tensor]]] = {}

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """A context in which no adapter changes. Outputs and gradients stay the same, bit for bit."""
        self._cast_again()
        try:
            for layer in self._layers:
                layer.casts = self
            yield
        finally:
            for layer in self._layers:
                layer.casts = None

    @torch.no_grad()
    def _cast_again(self) -> None:
        every = self._operands.values()
        targets = [part for operands, _ in every for part in operands.parts(operands.down, 0)]
        targets += [up for operands, _ in every for up in operands.ups]
        downs = [down for _, adapters in every for down in adapters[::2]]
        ups = [up for _, adapters in every for up in adapters[1::2]]
        scales = [layer.scale for operands, _ in every for layer in operands.layers]
        if ups:
            torch._foreach_copy_(targets, downs + list(torch._foreach_mul(ups, scales)))

    @torch.no_grad()
    def operands(
        self, key: Any, layers: Sequence[_Frozen], adapters: Sequence[Tensor], dtype: torch.dtype
    ) -> _Operands | None:
        """The operands of layers; None if passes make them."""
        large = sum(part.numel() for part in adapters) > self.MOST
        if not self.every and (large or dtype == adapters[0].dtype):
            return None
        if (key, dtype) not in self._operands:
            self._operands[key, dtype] = _Operands.of(layers, adapters, dtype), adapters
        return self._operands[key, dtype][0]


class _LoraProducts(torch.autograd.Function):
    """x W^T + b + s (d A^T) B^T for layers with the same x, where d is x or x after dropout; [M, in] to [M, out] each.

    A and s B are cast to the dtype of x, to which their gradients are rounded, as under autocast. `adapters` lists A
    and B of each layer in order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        layers: Sequence[_Frozen],
        shared: _Operands | None,
        *adapters: Tensor,
    ) -> tuple[Tensor, ...]:
        operands = shared or _Operands.of(layers, adapters, x.dtype)
        shrunk, outs = operands.products(x, dropped)
        ctx.save_for_backward(x, dropped, shrunk, *adapters)
        ctx.layers, ctx.shared = layers, shared
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, dropped, shrunk, *adapters = ctx.saved_tensors
        operands = ctx.shared or _Operands.of(ctx.layers, adapters, x.dtype)
        grad_shrunk = torch.empty_like(shrunk)
        grad_ups = []
        parts = zip(grads, operands.ups, operands.parts(shrunk), operands.parts(grad_shrunk), strict=True)
        for layer, (grad, up, part, grad_part) in zip(ctx.layers, parts, strict=True):
            torch.mm(grad, up, out=grad_part)
            grad_ups.append((grad.T @ part).to(adapters[1].dtype).mul_(layer.scale))
        grad_down = grad_shrunk.T @ (x if dropped is None else dropped)
        grad_downs = operands.parts(grad_down.to(adapters[0].dtype), 0)
        grad_adapters = [grad for pair in zip(grad_downs, grad_ups, strict=True) for grad in pair]
        needs_x, needs_dropped = ctx.needs_input_grad[:2]
        through_down = grad_shrunk @ operands.down if needs_x or needs_dropped else None
        if dropped is None:
            grad_x = None if through_down is None else operands.add_bases(grads, through_down)
            return grad_x, None, None, None, *grad_adapters
        grad_x = operands.add_bases(grads, torch.zeros_like(x)) if needs_x else None
        return grad_x, through_down, None, None, *grad_adapters


# PEFT's layer casts the input to the adapter's float32, which autocast casts back; each layer keeps a copy, though q, k
# and v could share one. It also computes B's output, scales it and adds it, in three tensors as large as the layer's
# output.
class LeanLoraLinear(LoraLinear):
    """LoRA whose forward and backward passes keep and write fewer tensors than PEFT's.

    This class uses PEFT's code if autocast doesn't cast input and adapter to one dtype, if several
    adapters are active, and if the base is trained.
    """

    #: The operands that passes share; None outside of `SharedCasts.unchanged`.
    casts: SharedCasts | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map x [..., in_features] to [..., out_features], in the dtype of the base's output."""
        if args or kwargs or not self.is_plain(x):
            return super().forward(x, *args, **kwargs)
        dropped = self.lora_dropout[self.active_adapters[0]](x) if self.drops else None
        return _products(x, dropped, [self])[0]

    @property
    def drops(self) -> bool:
        """Whether dropout is now applied to the adapter's input."""
        return self.training and not isinstance(self.lora_dropout[self.active_adapters[0]], nn.Identity)

    def is_plain(self, x: Tensor) -> bool:
        """Whether the output is the sum of a frozen base and one adapter, computed in one dtype."""
        if self.disable_adapters or self.merged or self.lora_variant or len(self.active_adapters) != 1:
            return False
        trained = any(parameter.requires_grad for parameter in self.base_layer.parameters())
        mixed = x.dtype != torch.float32 and not torch.is_autocast_enabled(x.device.type)
        name = self.active_adapters[0]
        return name in self.lora_A and not self.lora_bias[name] and not trained and not mixed


def products(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """Outputs of layers with the same x [..., in], with fewer passes if all are plain LoRA without dropout."""
    lean = [layer for layer in layers if isinstance(layer, LeanLoraLinear) and layer.is_plain(x) and not layer.drops]
    return _products(x, None, lean) if len(lean) == len(layers) else tuple(layer(x) for layer in layers)


def _products(x: Tensor, dropped: Tensor | None, layers: Sequence[LeanLoraLinear]) -> tuple[Tensor, ...]:
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    rows, thinned = (None if t is None else t.flatten(0, -2).to(dtype) for t in (x, dropped))
    frozen, adapters = _read(layers)
    casts, key = layers[0].casts, (id(layers[0]), len(layers), layers[0].active_adapters[0])
    shared = casts.operands(key, frozen, adapters, dtype) if casts else None
    outs = _LoraProducts.apply(rows, thinned, frozen, shared, *adapters)
    return tuple(out.unflatten(0, x.shape[:-1]) for out in outs)


def _read(layers: Sequence[LeanLoraLinear]) -> tuple[list[_Frozen], list[Tensor]]:
    """The base of each layer, and A and B of each in order."""
    frozen: list[_Frozen] = []
    adapters: list[Tensor] = []
    for layer in layers:
        name, base = layer.active_adapters[0], layer.base_layer
        assert isinstance(base, (nn.Linear, PackedLinear))
        frozen.append(_Frozen(base, layer.scaling[name]))
        adapters += [side[name].get_parameter("weight") for side in (layer.lora_A, layer.lora_B)]
    return frozen, adapters


class PackedLoraLinear(LeanLoraLinear):
    """LoRA around a `PackedLinear`; A and B are float32, and the output has the dtype of the base's output."""

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Only plain LoRA, because variants (DoRA, ...) read the dense weight."""
        return {(): None}

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> NoReturn:
        """Raise an error: packed weights can't be updated."""
        raise ValueError(
            f"can't merge an adapter into {self.get_base_layer().weights_format} weights without loss; keep it as an "
            "adapter, or merge it into the dense model"
        )

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        assert isinstance(module, PackedLinear)
        return module.in_features, module.out_features


def register_lora(config: LoraConfig) -> LoraConfig:
    """Make `config` use this module's classes for `PackedLinear` and dense layers; returns it."""
    config._register_custom_module({PackedLinear: PackedLoraLinear, nn.Linear: LeanLoraLinear})
    return config
