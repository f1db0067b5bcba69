"""Linear layers: packed 4-bit weights, their adapters, and products of layers with the same input for each device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qerl.formats.codecs import (
    NF4_KERNEL_DTYPES,
    Packed,
    dequantize,
    joined,
    multiply_nf4,
    split_rows,
    tensor_specs,
)
from qerl.formats.layouts import Tiles, Words
from qerl.kernels.cuda.w4a16 import RANK_STEP, Mode, Operands, RunsOfRows, dense, multiply
from qerl.kernels.state import Activation, RowRuns, gated
from qerl.settings.base import ConfigError
from qerl.settings.run import Kernels

# A linear layer with packed 4-bit weights, which is the frozen base under a LoRA adapter.


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
        """`nested` selects NF4 with double quantization; `dtype` is the bias's.

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

        The layer's rows are its parts' rows, in order.
        """
        for name in self.packed_names:
            delattr(self, name)
        self.tiles, self._parts, self.packed_names = tiles, parts, ("tiles_data",)
        self.register_buffer("tiles_data", tiles.data, persistent=False)

    @property
    def packed(self) -> Packed:
        """The packed weight, without a copy unless it is in tiles."""
        if self.tiles is not None:
            return joined([self.tiles.unpack(part) for part in self._parts])
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


#: A frozen layer.
Layer = nn.Linear | PackedLinear
Layout = TypeVar("Layout", Tiles, Words)


def weight_of(layer: Layer, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] of a layer in `dtype`, unpacked if it is packed."""
    return layer.dense_weight(dtype) if isinstance(layer, PackedLinear) else layer.weight.to(dtype)


def device_of(layer: Layer) -> torch.device:
    """The device of a layer's weights."""
    return (layer.qweight if isinstance(layer, PackedLinear) else layer.weight).device


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
    """A context in which every `PackedLinear` of `model` outside of experts keeps its weight unpacked in `dtype`.

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


# The base layer and adapter of a PEFT layer, and the stacked adapters of layers that run as one product.

#: The policy's adapter name in PEFT.
POLICY_ADAPTER = "default"


@dataclass(frozen=True)
class Lora:
    """An adapter that adds `scale` times `up` [N, R] times `down` [R, K] to a weight [N, K].

    Both may have experts as a further, first dimension. R is 0 of a layer without an adapter.
    """

    down: Tensor
    up: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """R."""
        return self.down.shape[-2]


class Adapted(NamedTuple):
    """A base layer with the policy's adapter."""

    base: Layer
    lora: Lora


def unwrap(layer: nn.Module) -> Adapted:
    """The base and adapter of a linear layer. Raises `ConfigError` for another layer, and for a LoRA variant."""
    lora: Lora | None = None
    if isinstance(layer, LoraLayer):
        if POLICY_ADAPTER in layer.lora_variant or layer.lora_bias.get(POLICY_ADAPTER):
            raise ConfigError("the native engine supports only plain LoRA; use engine=vllm, or native on a CPU")
        if POLICY_ADAPTER in layer.lora_A:
            down, up = (part.get_parameter(f"{POLICY_ADAPTER}.weight") for part in (layer.lora_A, layer.lora_B))
            lora = Lora(down, up, float(layer.scaling[POLICY_ADAPTER]))
        layer = layer.get_base_layer()
    if not isinstance(layer, (nn.Linear, PackedLinear)):
        raise ConfigError(f"the native engine doesn't support layers of {type(layer).__name__}; use engine=vllm")
    if lora is None:
        device = device_of(layer)
        lora = Lora(
            torch.empty(0, layer.in_features, device=device), torch.empty(layer.out_features, 0, device=device), 0.0
        )
    return Adapted(layer, lora)


def embedding_weight(embedding: Any) -> Tensor:
    """The weight whose rows are the tokens' vectors. Raises `ConfigError` for an embedding with LoRA."""
    if isinstance(embedding, LoraLayer):
        raise ConfigError("the native engine doesn't support LoRA of the embedding; merge the adapter by PEFT")
    weight: Tensor = embedding.weight
    return weight


class Cohort:
    """Policies of several runs on one base, which a sampler serves together by the modules of the first."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.runs = RowRuns(len(models))
        self._models = models
        self._names = {module: name for name, module in models[0].named_modules()}

    def of(self, module: nn.Module) -> list[nn.Module]:
        """The module of each run in the place of a module of the first run."""
        return [model.get_submodule(self._names[module]) for model in self._models]


def adapted_layers(
    layers: Sequence[nn.Module], cohort: Cohort | None
) -> tuple[list[nn.Linear | PackedLinear], list[Lora]]:
    """The base of each layer, and its adapter; in a cohort one adapter of each run, layer by layer."""
    runs = [[unwrap(one) for one in (cohort.of(layer) if cohort else [layer])] for layer in layers]
    if not all(one.base is first.base for first, *others in runs for one in others):
        raise ValueError("the policies of a cohort must share the layers of their base")
    return [first.base for first, *_ in runs], [one.lora for each in runs for one in each]


class StackedLora:
    """Adapters of layers with the same input as one: `down` [R, K], and block-diagonal `up` [N, R].

    R is the sum of the ranks; `up` includes the adapters' scales. Both are in `dtype`, and their addresses never
    change. Those of experts have these as a further, first dimension. With `runs`, each layer has one adapter of each
    run in turn, and a row of x takes the ranks of its own run (`of_own_run`), which `run_of_rank` [R] names.
    """

    def __init__(self, loras: Sequence[Lora], dtype: torch.dtype, runs: RowRuns | None = None) -> None:
        *experts, _, columns = loras[0].down.shape
        self._loras, device, self.runs = loras, loras[0].down.device, runs
        self._each = runs.count if runs else 1  # adapters of a layer
        self.rank, rows = sum(lora.rank for lora in loras), sum(lora.up.shape[-2] for lora in loras[:: self._each])
        self.run_of_rank: Tensor | None = None
        if runs is not None:
            numbers = torch.arange(len(loras), dtype=torch.int32) % runs.count
            self.run_of_rank = numbers.repeat_interleave(torch.tensor([lora.rank for lora in loras])).to(device)
        self.down = torch.zeros(*experts, self.rank, columns, dtype=dtype, device=device)
        self.up = torch.zeros(*experts, rows, self.rank, dtype=dtype, device=device)
        self.sync()

    def parts(self, down: Tensor, up: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each layer's A and B in tensors of the shapes of `down` and `up`."""
        parts, row, rank = [], 0, 0
        for number, lora in enumerate(self._loras, 1):
            rows, ranks = slice(row, row + lora.up.shape[-2]), slice(rank, rank + lora.rank)
            parts.append((down[..., ranks, :], up[..., rows, ranks]))
            row, rank = row if number % self._each else rows.stop, ranks.stop
        return parts

    def of_own_run(self, shrunk: Tensor) -> Tensor:
        """A x [B, R] with 0 at the ranks of other runs than a row's."""
        if self.runs is None or self.run_of_rank is None:
            return shrunk
        return shrunk.masked_fill_(self.runs.rows[:, None] != self.run_of_rank, 0.0)

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the present adapters."""
        pairs = zip(self._loras, self.parts(self.down, self.up), strict=True)
        adapted = [(lora, *part) for lora, part in pairs if lora.rank]
        if adapted:
            loras, downs, ups = zip(*adapted, strict=True)
            scaled = torch._foreach_mul([lora.up for lora in loras], [lora.scale for lora in loras])
            torch._foreach_copy_([*downs, *ups], [*(lora.down for lora in loras), *scaled])


# Layers with the same input as one product: in PyTorch for any layer and device, by bitsandbytes for NF4.


class TorchLinear:
    """A `FusedLinear` in plain PyTorch. Packed weights are unpacked in every call."""

    #: The dtype of the joint bias; None for the activations' dtype.
    _BIAS_DTYPE: torch.dtype | None = None

    def __init__(self, layers: Sequence[nn.Module], dtype: torch.dtype, cohort: Cohort | None = None) -> None:
        self._bases, loras = adapted_layers(layers, cohort)
        self._dtype = dtype
        self._adapters = StackedLora(loras, dtype, cohort.runs if cohort else None)
        dense = [base for base in self._bases if isinstance(base, nn.Linear)]
        self._weight = stacked(dense) if len(dense) == len(self._bases) else None  # else some layers are packed
        self.out_features = sum(base.out_features for base in self._bases)
        biased = [base.bias for base in self._bases if base.bias is not None]
        self._bias = None
        if biased:
            self._bias = torch.zeros(self.out_features, dtype=self._BIAS_DTYPE or dtype, device=biased[0].device)
        self.sync()

    @torch.no_grad()
    def sync(self) -> None:
        """See `FusedLinear`."""
        self._adapters.sync()
        if self._bias is not None:
            for part, base in zip(self._parts(self._bias), self._bases, strict=True):
                if base.bias is not None:
                    part.copy_(base.bias)

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False, activation: Activation | None = None) -> None:
        """See `FusedLinear`."""
        if activation:
            both = torch.empty(len(x), self.out_features, dtype=out.dtype, device=out.device)
            self._product(x, both, residual=False)
            gated(both, activation, out)
        else:
            self._product(x, out, residual)

    def _product(self, x: Tensor, out: Tensor, residual: bool) -> None:
        if self._weight is not None:
            _multiply(x, self._weight, self._bias, out, residual)
        else:
            biases = [None] * len(self._bases) if self._bias is None else self._parts(self._bias)
            for part, bias, base in zip(self._parts(out), biases, self._bases, strict=True):
                self._multiply_base(x, base, bias, part, residual)
        if self._adapters.rank:
            out.addmm_(self._adapters.of_own_run(x @ self._adapters.down.T), self._adapters.up.T)

    def _multiply_base(self, x: Tensor, base: Layer, bias: Tensor | None, out: Tensor, residual: bool) -> None:
        _multiply(x, weight_of(base, self._dtype), bias, out, residual)

    def _parts(self, joint: Tensor) -> tuple[Tensor, ...]:
        """The columns of each layer's output."""
        return joint.split([base.out_features for base in self._bases], dim=-1)


class BitsandbytesLinear(TorchLinear):
    """A `FusedLinear` of NF4 layers on a GPU by bitsandbytes, which has one fused kernel for few rows."""

    def _multiply_base(self, x: Tensor, base: Layer, bias: Tensor | None, out: Tensor, residual: bool) -> None:
        assert isinstance(base, PackedLinear)
        product = multiply_nf4(x, base.packed.tensors, (base.out_features, base.in_features), bias)
        if residual:
            out += product
        else:
            out.copy_(product)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, residual: bool) -> None:
    if residual:
        out.addmm_(x, weight.T)
        if bias is not None:
            out += bias
    elif bias is not None:
        torch.addmm(bias, x, weight.T, out=out)
    else:
        torch.mm(x, weight.T, out=out)


@torch.no_grad()
def stacked(layers: Sequence[nn.Linear]) -> Tensor:
    """The weights of `layers` as one tensor [N, K]; the layers' weights become views of it."""
    weights = [layer.weight for layer in layers]
    rows, columns = sum(len(weight) for weight in weights), weights[0].shape[1]
    if not _adjacent(weights):
        joint = torch.cat([weight.data for weight in weights])
        for weight, part in zip(weights, joint.split([len(weight) for weight in weights]), strict=True):
            weight.data = part
    return weights[0].data.as_strided((rows, columns), (columns, 1))


def _adjacent(weights: Sequence[Tensor]) -> bool:
    """Whether the weights are contiguous and adjacent in the same storage."""
    return all(weight.is_contiguous() for weight in weights) and all(
        after.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
        and after.data_ptr() == before.data_ptr() + before.numel() * before.element_size()
        for before, after in pairwise(weights)
    )


# Linear layers with 4-bit weights and LoRA that run as one product on a Hopper GPU.


def shared_weights(bases: Sequence[PackedLinear], layout: type[Layout], interleaved: bool = False) -> Layout:
    """The tiles or words that these layers already share, or new ones, which replace the layers' packed tensors.

    With `interleaved`, the layers are gate and up, or one with both as its halves.
    """
    weights = bases[0].tiles
    if not isinstance(weights, layout):
        packed, options = [base.packed for base in bases], {"interleaved": True} if interleaved else {}
        if interleaved and len(bases) == 1:
            packed = split_rows(packed[0], bases[0].out_features // 2)
        weights = layout.pack(packed, **options)
        parts = len(packed) // len(bases)
        for number, base in enumerate(bases):
            base.use_tiles(weights, *range(number * parts, (number + 1) * parts))
    return weights


def is_hopper(capability: tuple[int, int] | None) -> bool:
    """Whether a GPU of this compute capability (None: the CPU) has the instructions of `W4Linear`."""
    return capability is not None and capability[0] == 9


class W4Linear:
    """A `FusedLinear` of NVFP4 or MXFP4 layers with bfloat16 activations.

    The layers' weights move into `Tiles`, whose parts the layers then read, so there is only one copy.
    """

    def __init__(self, layers: Sequence[nn.Module], interleaved: bool = False, cohort: Cohort | None = None) -> None:
        """With `interleaved`, the layers are gate and up, or one with both as its halves, called with an activation."""
        frozen, self._loras = adapted_layers(layers, cohort)
        bases = [base for base in frozen if isinstance(base, PackedLinear)]
        self.tiles = shared_weights(bases, Tiles, interleaved)
        self.out_features = self.tiles.rows
        device, self._runs = self.tiles.data.device, cohort.runs.count if cohort else 1
        if len(self.tiles.parts) > len(layers):
            # Phi-3's fused gate and up is stored as two layers whose rows alternate, so that the product applies SiLU
            # itself. Both have its A. A x is computed twice, at rank 16 under 0.2 % of the layer's bytes.
            halves = [[Lora(lora.down, up, lora.scale) for up in lora.up.detach().chunk(2)] for lora in self._loras]
            self._loras = [half[part] for part in range(2) for half in halves]
        #: The ranks of a run's adapter, padded.
        self._rank = -(-max(lora.rank for lora in self._loras) // RANK_STEP) * RANK_STEP
        ranks = self._rank * self._runs
        shape = (len(self.tiles.parts), ranks, self.tiles.columns)
        self.operands = Operands(
            tiles=self.tiles,
            bias=_bias(bases, interleaved),
            down=torch.zeros(shape, dtype=torch.bfloat16, device=device),
            ups=[torch.zeros(rows, ranks, dtype=torch.bfloat16, device=device) for rows in self.tiles.parts],
            scales=torch.tensor([lora.scale for lora in self._loras], device=device),
            runs=cohort.runs if cohort else None,
        )
        self._scales = self.operands.scales.clone()
        self.sync()

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """The copies of `sync` as (target, source); further ranks of the targets stay zero."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for number, lora in enumerate(self._loras):
            part, run = divmod(number, self._runs)
            if lora.rank:
                ranks = slice(run * self._rank, run * self._rank + lora.rank)
                pairs += [(self.operands.down[part, ranks], lora.down), (self.operands.ups[part][:, ranks], lora.up)]
        return pairs

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the present adapters, in bfloat16."""
        for target, source in self.copies():
            target.copy_(source)
        self.contain()

    @torch.no_grad()
    def contain(self) -> None:
        """After copies: a run of stacked ones whose B isn't finite gets NaN as the scale, and the values are 0.

        So its rows become NaN, and others don't, which multiply its B by 0.
        """
        if self.operands.cohort is not RunsOfRows.STACKED:
            return
        scales = self.operands.scales.view(-1, self._runs)
        for up, part, scale in zip(self.operands.ups, self._scales.view_as(scales), scales, strict=True):
            by_run = up.view(len(up), self._runs, self._rank)
            scale.copy_(part.where(by_run.isfinite().all(-1).all(0), torch.nan))
            up.nan_to_num_(0.0, 0.0, 0.0)

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False, activation: Activation | None = None) -> None:
        """See `FusedLinear`; x [m, in] and out [m, outs], with an activation [m, outs / 2], are contiguous bfloat16."""
        if bool(activation) != self.tiles.interleaved:
            raise ValueError(f"this layer is interleaved for an activation: {self.tiles.interleaved} ({activation=})")
        _check_activations(x, out, self.tiles, torch.bfloat16, activation)
        if activation:
            multiply(self.operands, x, out, Mode.GATED, activation)
        else:
            multiply(self.operands, x, out, Mode.RESIDUAL if residual else Mode.PLAIN)


def _bias(bases: Sequence[PackedLinear], interleaved: bool) -> Tensor | None:
    """The biases in float32, in the order of the tiles' rows; None without biases."""
    biases = [base.bias.data.float() for base in bases if base.bias is not None]
    if not biases:
        return None
    if interleaved or len(biases) < len(bases):
        raise ValueError("fused layers must all have a bias or none, and gate and up none")
    return torch.cat(biases)


# Linear layers with 4-bit weights and LoRA that run as one product on any supported GPU, by kernels in Triton.


class PortableLinear(TorchLinear):
    """A `FusedLinear` of NVFP4 or MXFP4 layers.

    The layers' weights move into `Words`, whose parts the layers then read, so there is only one copy.
    """

    _BIAS_DTYPE = torch.float32

    def __init__(self, layers: Sequence[nn.Module], dtype: torch.dtype, cohort: Cohort | None = None) -> None:
        from qerl.kernels.triton.linear import PortableOperands

        super().__init__(layers, dtype, cohort)
        words = shared_weights([base for base in self._bases if isinstance(base, PackedLinear)], Words)
        rows = [torch.full((part,), factor) for part, factor in zip(words.parts, words.factors, strict=True)]
        self.operands = PortableOperands(
            words=words,
            factors=torch.cat(rows).to(words.data.device),
            bias=self._bias,
            down=self._adapters.down,
            up=self._adapters.up,
            runs=self._adapters.runs,
            run_of_rank=self._adapters.run_of_rank,
        )

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False, activation: Activation | None = None) -> None:
        """See `FusedLinear`; x [m, in] and out [m, outs], with an activation [m, outs / 2], are contiguous."""
        from qerl.kernels.triton.linear import multiply

        _check_activations(x, out, self.operands.words, self._dtype, activation)
        multiply(self.operands, x, out, residual, activation)


def _check_activations(
    x: Tensor, out: Tensor, weights: Tiles | Words, dtype: torch.dtype, activation: Activation | None
) -> None:
    width = weights.rows // 2 if activation else weights.rows
    if x.shape[1] != weights.columns or out.shape != (len(x), width):
        raise ValueError(f"x {tuple(x.shape)}, out {tuple(out.shape)} don't fit this layer ({activation=})")
    if any(tensor.dtype != dtype or not tensor.is_contiguous() for tensor in (x, out)):
        raise ValueError(f"activations must be contiguous {dtype}")


# Dense layers with few outputs and their adapters, as one launch on a GPU.

#: The most rows of x for which one launch is worth it; with more, cuBLAS's five launches read x fewer times.
_MOST_ROWS = 128


class NarrowLinear(TorchLinear):
    """A `FusedLinear` of dense layers; with few rows in 16 bits, product and adapters are one launch on a GPU."""

    def __init__(self, layers: Sequence[nn.Module], dtype: torch.dtype, cohort: Cohort | None = None) -> None:
        super().__init__(layers, dtype, cohort)
        self._fused = self._weight is not None and self._bias is None and dtype.itemsize == 2

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False, activation: Activation | None = None) -> None:
        """See `FusedLinear`."""
        if residual or activation or not (self._fused and x.is_cuda and len(x) <= _MOST_ROWS):
            super().__call__(x, out, residual, activation)
            return
        from qerl.kernels.triton.linear import narrow_product

        assert self._weight is not None
        lora = self._adapters
        if lora.rank:
            narrow_product(x, self._weight, lora.down, lora.up, out, lora.runs, lora.run_of_rank)
        else:
            narrow_product(x, self._weight, x[:0], x[:0], out)


# Matrix products of a decode step: their protocol, and the choice of an implementation for given layers.


class FusedLinear(Protocol):
    """Layers with the same input, as one product. Their outputs are concatenated."""

    #: N, the sum of the layers' outputs.
    out_features: int

    def sync(self) -> None:
        """Copy the present adapters and biases."""
        ...

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False, activation: Activation | None = None) -> None:
        """Write out [B, N] = W x + b + B (A x) for x [B, K], all contiguous in the model's dtype.

        With `residual` the result is added to `out`. With `activation`, out [B, N / 2] is activation(first half) *
        second half.
        """
        ...


def product_class(
    capability: tuple[int, int] | None,
    weights_format: str,
    shapes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    kernels: Kernels = "auto",
) -> type[W4Linear] | type[PortableLinear] | type[TorchLinear]:
    """The class of the product of layers of `shapes` [out, in] in a format, with activations of `dtype`.

    `capability` is the compute capability of the layers' GPU, and None on a CPU.
    """
    if capability is None:
        return TorchLinear
    for_hopper = kernels == "auto" and is_hopper(capability)
    fits = Tiles.fits if for_hopper else Words.fits
    if dtype == torch.bfloat16 and fits(weights_format, shapes):
        return W4Linear if for_hopper else PortableLinear
    return BitsandbytesLinear if weights_format == "nf4" and dtype in NF4_KERNEL_DTYPES else TorchLinear


def fuse(
    layers: Sequence[nn.Module],
    dtype: torch.dtype,
    gated: bool = False,
    kernels: Kernels = "auto",
    cohort: Cohort | None = None,
) -> FusedLinear:
    """Combine layers with the same input into one product: `nn.Linear`, `PackedLinear` or PEFT's LoRA around either.

    `dtype` is the activations' dtype. `gated` layers are gate and up, or one with both as its halves, called with
    an activation. `kernels` is the setting. In a `cohort`, each run has its own adapter of these layers.
    """
    bases = [unwrap(layer).base for layer in layers]
    formats = {base.weights_format if isinstance(base, PackedLinear) else "bf16" for base in bases}
    shapes = [(base.out_features, base.in_features) for base in bases]
    # Layers in several formats have no common product.
    kind = product_class(_capability(bases[0]), formats.pop() if len(formats) == 1 else "", shapes, dtype, kernels)
    if issubclass(kind, W4Linear):
        return W4Linear(layers, gated, cohort)
    return kind(layers, dtype, cohort)


def _capability(base: Layer) -> tuple[int, int] | None:
    device = device_of(base)
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
