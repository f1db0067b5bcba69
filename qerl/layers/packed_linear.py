"""A linear layer with packed 4-bit weights, which is the frozen base under a LoRA adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qerl.formats import tiles as tile_layout
from qerl.formats import words as word_layout
from qerl.formats.codecs import Packed, dequantize, joined, tensor_specs
from qerl.formats.tiles import Tiles
from qerl.formats.words import Words
from qerl.kernels.unpack import dense


class _PackedProduct(torch.autograd.Function):
    """x W^T + b, which unpacks W again in the backward pass instead of saving it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: PackedLinear) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, layer.dense_weight(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ ctx.layer.dense_weight(grad.dtype)
        if ctx.needs_input_grad[1]:
            grad_bias = grad.flatten(0, -2).sum(0)
        return grad_x, grad_bias, None


class PackedLinear(nn.Module):
    """y = x W^T + b with W [out_features, in_features] in a 4-bit format; x [..., in_features] sets the dtype of y.

    The packed tensors are buffers with the names of `Packed.tensors`; they have no gradient, and `.to(dtype)` doesn't
    change them. A new layer is uninitialised; `from_packed` makes one with values.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weights_format: str,
        *,
        bias: bool = False,
        nested: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """`nested` selects NF4 with double quantization; `dtype` is that of the bias.

        Raises `FormatError` for a shape that the format doesn't support.
        """
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weights_format = weights_format
        specs = tensor_specs(weights_format, (out_features, in_features), nested)
        self.packed_names = tuple(specs)
        for name, (shape, packed_dtype) in specs.items():
            self.register_buffer(name, torch.empty(shape, dtype=packed_dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None
        self._dense: Tensor | None = None
        #: Whether `dense_weights` may keep the weight unpacked. Those of experts are too many.
        self.keepable = True
        #: The weights in the layout of the GPU's kernels, after `use_tiles` has replaced the buffers.
        self.tiles: Tiles | Words | None = None
        self._parts: tuple[int, ...] = ()

    @classmethod
    def from_packed(cls, packed: Packed, bias: Tensor | None = None) -> PackedLinear:
        """A layer with the tensors of `packed`, without copying them, and `bias` [out_features]."""
        out_features, in_features = packed.shape
        nested = "weight_nested_absmax" in packed.tensors
        layer = cls(in_features, out_features, packed.weights_format, nested=nested, device="meta")
        for name in layer.packed_names:
            setattr(layer, name, packed.tensors[name])
        layer.bias = None if bias is None else nn.Parameter(bias)
        return layer

    def use_tiles(self, tiles: Tiles | Words, *parts: int) -> None:
        """Use `parts` of `tiles`, which other layers may share, and drop the layer's packed tensors.

        The layer's rows are those of its parts, in order.
        """
        for name in self.packed_names:
            delattr(self, name)
        self.tiles, self._parts, self.packed_names = tiles, parts, ("tiles_data",)
        self.register_buffer("tiles_data", tiles.data, persistent=False)

    @property
    def packed(self) -> Packed:
        """The packed weight, without a copy unless it is in tiles."""
        if isinstance(self.tiles, Words):
            return joined([word_layout.unpack(self.tiles, part) for part in self._parts])
        if self.tiles is not None:
            return joined([tile_layout.unpack(self.tiles, part) for part in self._parts])
        tensors = {name: self.get_buffer(name) for name in self.packed_names}
        return Packed(self.weights_format, (self.out_features, self.in_features), tensors)

    @property
    def qweight(self) -> Tensor:
        """The packed codes, under the name that PEFT uses to find the device of a quantized layer."""
        return self.get_buffer(self.packed_names[0])

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight [out_features, in_features], unpacked now or kept by `dense_weights`."""
        if self._dense is not None and self._dense.dtype == dtype:
            return self._dense
        if self.tiles is not None and dtype == torch.bfloat16 and self.tiles.data.is_cuda:
            parts = [dense(self.tiles, part) for part in self._parts]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        return dequantize(self.packed, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in_features] to [..., out_features], in the dtype of x."""
        return _PackedProduct.apply(x, self.bias, self)

    def extra_repr(self) -> str:
        """Shape and format, in the style of `nn.Linear`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"weights_format={self.weights_format}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        # `.to(dtype)` casts floating-point buffers, so the scales are moved as bytes, which it doesn't cast.
        packed = {id(self.get_buffer(name)) for name in self.packed_names}
        self._dense = None

        def move(tensor: Tensor) -> Tensor:
            return fn(tensor.view(torch.uint8)).view(tensor.dtype) if id(tensor) in packed else fn(tensor)

        return super()._apply(move, recurse)


def packed_format(model: nn.Module) -> str | None:
    """The weight format of a model's packed layers; None of a dense model."""
    layers = (module for module in model.modules() if isinstance(module, PackedLinear))
    return next((layer.weights_format for layer in layers), None)


def unpacked_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """The bytes of memory that `dense_weights` needs."""
    layers = _keepable(model)
    return sum(layer.in_features * layer.out_features for layer in layers) * dtype.itemsize


def _keepable(model: nn.Module) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear) and module.keepable]


@contextmanager
def dense_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """A context in which every `PackedLinear` of `model`, but those of experts, keeps its weight unpacked in `dtype`.

    Samplers and updates use it for many passes on the same weights, if there is memory (`unpacked_bytes`). Outputs for
    inputs of `dtype` stay the same, bit for bit.
    """
    layers = _keepable(model)
    before = [layer._dense for layer in layers]
    try:
        for layer in layers:
            layer._dense = layer.dense_weight(dtype)
        yield
    finally:
        for layer, dense in zip(layers, before, strict=True):
            layer._dense = dense
