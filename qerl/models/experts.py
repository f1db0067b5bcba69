"""The MLP of a block: one dense MLP, or a mixture of experts whose layers are grouped products with LoRA."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import SiLUActivation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from qerl.formats.layouts import KERNEL_FORMATS, Words
from qerl.kernels import operations, reference
from qerl.kernels.state import GroupedLora, Groups
from qerl.models.linear import (
    POLICY_ADAPTER,
    Layer,
    Lora,
    PackedLinear,
    StackedLora,
    device_of,
    shared_weights,
    stacked,
    weight_of,
)
from qerl.models.lora import products

# The MLP of a block. With a kernel for the device, its activation takes one pass over memory in each direction.

#: transformers' classes that compute only down(silu(gate(x)) * up(x)).
_PLAIN = ("Qwen2MLP", "Qwen3MLP", "LlamaMLP", "MistralMLP", "Qwen3_5MLP", "Qwen3_5MoeMLP")


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up by Triton, which saves only gate and up for the backward pass; PyTorch saves silu(gate) too."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        from qerl.kernels.triton import norms

        ctx.save_for_backward(*tensors)
        return norms.swiglu_forward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        from qerl.kernels.triton import norms

        return norms.swiglu_backward(grad, *ctx.saved_tensors)


def swiglu(*tensors: Tensor) -> Tensor:
    """silu(gate) * up of two tensors, or [M, I] of one tensor [M, 2 I] with both side by side, which isn't copied.

    By Triton on a GPU, and by PyTorch elsewhere and in float64.
    """
    if (
        tensors[0].is_cuda
        and torch.float64 not in (dtypes := {tensor.dtype for tensor in tensors})
        and len(dtypes) == 1
    ):
        return _SwiGLU.apply(*tensors)
    gate, up = tensors if len(tensors) == 2 else tensors[0].chunk(2, -1)
    return nn.functional.silu(gate) * up


class _ClampedGLU(torch.autograd.Function):
    """The gate of gpt-oss's experts, which saves only gate and up; PyTorch saves five tensors more."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(both)
        ctx.numbers = alpha, limit
        kernels = reference if both.dtype == torch.float64 else operations(both.device)
        return kernels.clamped_glu(both, alpha, limit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        [both] = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            out = reference.clamped_glu(both, *ctx.numbers)
        return torch.autograd.grad(out, both, grad)[0], None, None


def clamped_glu(both: Tensor, alpha: float, limit: float) -> Tensor:
    """See `qerl.kernels.reference.clamped_glu`; on a GPU by Triton forward."""
    return _ClampedGLU.apply(both.contiguous(), alpha, limit)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) with the projections of `mlp`, under the same names."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj: nn.Module = mlp.get_submodule("gate_proj")
        self.up_proj: nn.Module = mlp.get_submodule("up_proj")
        self.down_proj: nn.Module = mlp.get_submodule("down_proj")

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., hidden] to the same shape."""
        return self.down_proj(swiglu(*products(x, (self.gate_proj, self.up_proj))))


def fuse_mlps(model: nn.Module) -> None:
    """Replace every MLP of a known plain class with SiLU by `GatedMLP`; projections and their names stay."""
    for name, module in list(model.named_modules()):
        silu = isinstance(getattr(module, "act_fn", None), (nn.SiLU, SiLUActivation))
        if silu and type(module).__name__ in _PLAIN:
            model.set_submodule(name, GatedMLP(module))


# Layers of all experts of a mixture as one grouped product, with its gradient and with the sum of experts' outputs.


class GroupedLinear(ABC):
    """Layers of every expert that read the same input, as one product; an expert's outputs are concatenated."""

    #: The same products of dense tensors, for adapters.
    dense: ModuleType

    def __init__(self, experts: Sequence[Sequence[Layer]]) -> None:
        #: N, the outputs of an expert, and K, its inputs.
        self.out_features = sum(layer.out_features for layer in experts[0])
        self.in_features = experts[0][0].in_features
        self._bias = _biases(experts)

    def sync(self) -> None:  # noqa: B027
        """Do nothing: adapters are apart."""

    @abstractmethod
    def __call__(
        self, x: Tensor, groups: Groups, out: Tensor, silu: bool = False, lora: GroupedLora | None = None
    ) -> None:
        """Write out [pairs, N] = W x + b of each pair's expert, plus `lora`, for x [T, K] by tokens or [pairs, K].

        With `silu`, out [pairs, N/2] = silu(first half) * second half. All tensors are contiguous and of one dtype.
        """

    @abstractmethod
    def input_gradient(self, grad: Tensor, groups: Groups, out: Tensor) -> None:
        """Write each pair's input gradient, out [pairs, K], given its output gradient [T, N] or [pairs, N]."""


class TorchGroupedLinear(GroupedLinear):
    """A `GroupedLinear` in plain PyTorch, which unpacks one expert after the other.

    It waits for the device, so that no CUDA graph can have it.
    """

    dense: ModuleType = reference

    def __init__(self, experts: Sequence[Sequence[Layer]]) -> None:
        super().__init__(experts)
        self._experts = experts

    def __call__(
        self, x: Tensor, groups: Groups, out: Tensor, silu: bool = False, lora: GroupedLora | None = None
    ) -> None:
        """See `GroupedLinear`."""
        both = out.new_empty(groups.count, self.out_features) if silu else out
        reference.product(x, groups, lambda number: self._weight(number, x.dtype), self._bias, both)
        if lora is not None:
            added = torch.empty_like(both)
            reference.dense_product(lora.up, lora.shrunk, groups, added)
            both += added
        if silu:
            gate, up = both.chunk(2, dim=-1)
            torch.mul(nn.functional.silu(gate), up, out=out)

    def input_gradient(self, grad: Tensor, groups: Groups, out: Tensor) -> None:
        """See `GroupedLinear`."""
        reference.input_gradient(grad, groups, lambda number: self._weight(number, grad.dtype), out)

    def _weight(self, number: int, dtype: torch.dtype) -> Tensor:
        """An expert's weights [N, K]."""
        weights = [weight_of(layer, dtype) for layer in self._experts[number]]
        return torch.cat(weights) if len(weights) > 1 else weights[0]


class PortableGroupedLinear(GroupedLinear):
    """A `GroupedLinear` by kernels in Triton: of NVFP4 or MXFP4 layers, or of dense ones.

    The layers' weights move into one tensor, whose parts the layers then read, so there is only one copy.
    """

    def __init__(self, experts: Sequence[Sequence[Layer]], dtype: torch.dtype) -> None:
        from qerl.kernels import triton
        from qerl.kernels.triton.experts import GroupedOperands

        super().__init__(experts)
        self.dense: ModuleType = triton
        layers = list(chain.from_iterable(experts))
        packed = [layer for layer in layers if isinstance(layer, PackedLinear)]
        dense = [layer for layer in layers if isinstance(layer, nn.Linear)]
        weights: Words | Tensor = shared_weights(packed, Words) if packed else stacked(dense)
        factors = None
        if isinstance(weights, Words):
            parts = torch.tensor(weights.parts)
            factors = torch.tensor(weights.factors).repeat_interleave(parts).to(weights.data.device)
        self._dtype = dtype
        self.operands = GroupedOperands(
            weights, self.out_features, factors, None if self._bias is None else self._bias.float().flatten()
        )

    def __call__(
        self, x: Tensor, groups: Groups, out: Tensor, silu: bool = False, lora: GroupedLora | None = None
    ) -> None:
        """See `GroupedLinear`."""
        from qerl.kernels.triton.experts import multiply

        width = self.out_features // 2 if silu else self.out_features
        self._check(x, self.in_features, out, width, groups)
        multiply(self.operands, x, groups, out, silu, lora)

    def input_gradient(self, grad: Tensor, groups: Groups, out: Tensor) -> None:
        """See `GroupedLinear`."""
        from qerl.kernels.triton.experts import input_gradient

        self._check(grad, self.out_features, out, self.in_features, groups)
        input_gradient(self.operands, grad, groups, out)

    def _check(self, x: Tensor, columns: int, out: Tensor, width: int, groups: Groups) -> None:
        tokens = groups.count // groups.chosen
        if len(x) not in (tokens, groups.count) or x.shape[1] != columns or out.shape != (groups.count, width):
            raise ValueError(f"x {tuple(x.shape)}, out {tuple(out.shape)} don't fit these layers of experts")
        if any(tensor.dtype != self._dtype or not tensor.is_contiguous() for tensor in (x, out)):
            raise ValueError(f"activations must be contiguous {self._dtype}")


def grouped(experts: Sequence[Sequence[Layer]], dtype: torch.dtype) -> TorchGroupedLinear | PortableGroupedLinear:
    """One product of layers that read the same input, of each expert in order, with activations of `dtype`."""
    layers = list(chain.from_iterable(experts))
    formats = {layer.weights_format if isinstance(layer, PackedLinear) else layer.weight.dtype for layer in layers}
    dense = formats == {dtype} and layers[0].in_features % 64 == 0
    has_kernels = device_of(layers[0]).type == "cuda" and dtype in (torch.bfloat16, torch.float32)
    if has_kernels and len(formats) == 1 and (dense or not formats.isdisjoint(KERNEL_FORMATS)):
        return PortableGroupedLinear(experts, dtype)
    return TorchGroupedLinear(experts)


def _biases(experts: Sequence[Sequence[Layer]]) -> Tensor | None:
    """The biases [experts, N]; None without biases."""
    if all(layer.bias is None for layer in chain.from_iterable(experts)):
        return None

    def bias(layer: Layer) -> Tensor:
        zeros = torch.zeros(layer.out_features, device=device_of(layer))
        return zeros if layer.bias is None else layer.bias.detach()

    return torch.stack([torch.cat([bias(layer) for layer in layers]) for layers in experts])


class _WeightedSum(torch.autograd.Function):
    """Sums [T, H] of y [T k, H] by weights float32 [T, k], in float32, with the gradients of both."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights)
        out = y.new_empty(len(weights), y.shape[1])
        operations(y.device).combine(y, weights, out, False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = ctx.saved_tensors
        return operations(y.device).combine_gradients(grad.contiguous(), y, weights)


# LoRA of all experts of a mixture as grouped products, with its gradients, and its copies for the engine.
#
# The base is read packed, as above. A x of a pair is computed by a grouped product of few
# rows, and B (A x) is added in the base's product.


class GroupedAdapters(StackedLora):
    """Adapters of a grouped product in the dtype of its activations; A and B have all experts."""

    def __init__(self, loras: Sequence[Lora], dense: ModuleType, dtype: torch.dtype) -> None:
        super().__init__(loras, dtype)
        self._dense = dense

    def __call__(self, x: Tensor, groups: Groups) -> GroupedLora:
        """What the adapters add to the product of x [T, K] or [pairs, K]."""
        shrunk = x.new_empty(groups.count, self.rank)
        self._dense.dense_product(self.down, x, groups, shrunk)
        return GroupedLora(shrunk, self.up)


class _GroupedProduct(torch.autograd.Function):
    """Outputs [pairs, N] of x [T, K] or [pairs, K], with the gradients of x and of the layers' A and B, if any.

    It saves x and A x only with adapters, whose A and s B are cast to the dtype of x in each direction. Their
    gradients are sums in float32. `adapters` lists A and B of each layer in order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups, linear: GroupedLinear, scale: float, *adapters: Tensor) -> Tensor:
        ctx.groups, ctx.linear, ctx.scale, ctx.rows = groups, linear, scale, len(x)
        lora = None
        if adapters:
            lora = GroupedAdapters(_loras(adapters, scale), linear.dense, x.dtype)(x, groups)
            ctx.save_for_backward(x, lora.shrunk, *adapters)
        out = x.new_empty(groups.count, linear.out_features)
        linear(x, groups, out, lora=lora)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        groups, dense, grad = ctx.groups, ctx.linear.dense, grad.contiguous()
        grads: list[Tensor] = []
        saved = ctx.saved_tensors  # once: a second look at them would recompute a checkpointed block again
        if saved:
            x, shrunk, *adapters = saved
            lora = StackedLora(_loras(adapters, ctx.scale), x.dtype)
            grad_shrunk = torch.empty_like(shrunk)
            dense.dense_input_gradient(lora.up, grad, groups, grad_shrunk)
            grad_down = dense.dense_weight_gradient(grad_shrunk, x, groups, len(lora.down))
            grad_up = dense.dense_weight_gradient(grad, shrunk, groups, len(lora.down)).mul_(ctx.scale)
            grads = [part.to(adapters[0].dtype) for pair in lora.parts(grad_down, grad_up) for part in pair]
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, *grads
        grad_x = grad.new_empty(groups.count, ctx.linear.in_features)
        ctx.linear.input_gradient(grad, groups, grad_x)
        if saved:
            dense.dense_input_gradient(lora.down, grad_shrunk, groups, grad_x, add=True)
        if ctx.rows != groups.count:
            grad_x = grad_x.view(ctx.rows, groups.chosen, -1).sum(1)
        return grad_x, None, None, None, *grads


def _loras(adapters: Sequence[Tensor], scale: float) -> list[Lora]:
    return [Lora(down, up, scale) for down, up in zip(adapters[::2], adapters[1::2], strict=True)]


def grouped_product(x: Tensor, groups: Groups, linear: GroupedLinear, loras: Sequence[Lora] = ()) -> Tensor:
    """Outputs [pairs, N] of each pair's expert for x [T, K] by tokens or [pairs, K], with gradients of x, A and B.

    `loras` has the adapter of each layer that reads x, with one scale, or none.
    """
    scale, adapters = (loras[0].scale if loras else 0.0), (part for lora in loras for part in (lora.down, lora.up))
    return _GroupedProduct.apply(x.contiguous(), groups, linear, scale, *adapters)


# The experts of a mixture as linear layers, which can be packed one by one, and its router in float32.
#
# transformers stacks the weights of a block's experts in two tensors. Most checkpoints, and llmcompressor's and
# ModelOpt's, have three linear layers an expert, and so have these modules, under the same names. gpt-oss has two.
# `qerl.checkpoints.layouts` splits the stacks of its files and of Qwen3.5's.


@dataclass(frozen=True)
class ExpertProducts:
    """The grouped products of a block's experts: `down` reads the activation of what `gate_up` makes."""

    gate_up: GroupedLinear
    down: GroupedLinear
    clamped: tuple[float, float] | None
    """alpha and limit of the clamped GLU between them; None for silu(first half) * second half, which `gate_up` has."""


@dataclass(frozen=True)
class ExpertLora:
    """Adapters of the layers of a block's experts by their product; none of a product without them."""

    gate_up: Sequence[Lora] = ()
    down: Sequence[Lora] = ()


class Experts(nn.ModuleList):
    """The experts of a block. A token's output is the weighted sum of its chosen experts' outputs."""

    def __init__(self, *modules: Any) -> None:
        super().__init__(*modules)
        self._products: dict[torch.dtype, ExpertProducts] = {}

    def products(self, dtype: torch.dtype) -> ExpertProducts:
        """The experts' frozen layers as grouped products with activations of `dtype`, made once.

        On a GPU the experts' weights move into one tensor for each of the two.
        """
        if dtype not in self._products:
            first, experts = self[0], list(self)
            parts = ("gate_proj", "up_proj") if isinstance(first, GatedMLP) else ("gate_up_proj",)
            clamped = (first.alpha, first.limit) if isinstance(first, GptOssExpert) else None
            layers = [[cast(Layer, expert.get_submodule(part)) for part in parts] for expert in experts]
            down = [[cast(Layer, expert.get_submodule("down_proj"))] for expert in experts]
            self._products[dtype] = ExpertProducts(grouped(layers, dtype), grouped(down, dtype), clamped)
        return self._products[dtype]

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor, lora: ExpertLora | None = None) -> Tensor:
        """Map hidden [T, H] to the same shape; `chosen` [T, k] are the numbers of the experts, `weights` [T, k].

        Frozen experts, with or without adapters, compute grouped products, in an autocast's dtype. Experts that are
        trained compute their tokens one after the other.
        """
        if hidden.is_meta:  # then no expert's tokens are known, and each computes all
            return sum((expert(hidden) for expert in self), torch.zeros_like(hidden))
        if self._are_trained():
            return self._one_by_one(hidden, chosen, weights)
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        products, groups = self.products(dtype), operations(hidden.device).group(chosen.int(), len(self))
        lora = lora or ExpertLora()
        both = grouped_product(hidden.to(dtype), groups, products.gate_up, lora.gate_up)
        inner = clamped_glu(both, *products.clamped) if products.clamped else swiglu(both)
        out = grouped_product(inner, groups, products.down, lora.down)
        return _WeightedSum.apply(out, weights.float().contiguous()).to(hidden.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Experts:
        self._products = {}
        return super()._apply(fn, recurse)

    def _are_trained(self) -> bool:
        # `parameters()` walks over hundreds of modules, which takes a host longer than the launches of a block.
        layers = chain.from_iterable(expert.children() for expert in self)
        return any(p is not None and p.requires_grad for layer in layers for p in layer._parameters.values())

    def _one_by_one(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for number in chosen.unique().tolist():
            tokens, places = torch.where(chosen == number)
            product = self[number](hidden[tokens]) * weights[tokens, places, None]
            out.index_add_(0, tokens, product.to(out.dtype))
        return out


class GptOssExpert(nn.Module):
    """down((up + 1) * gate * sigmoid(1.702 gate)), whose gate and up are every other output of one layer, clamped."""

    def __init__(self, gate_up_proj: nn.Linear, down_proj: nn.Linear, alpha: float, limit: float) -> None:
        super().__init__()
        self.gate_up_proj: nn.Module = gate_up_proj
        self.down_proj: nn.Module = down_proj
        self.alpha, self.limit = alpha, limit

    def forward(self, x: Tensor) -> Tensor:
        """Map x [T, hidden] to the same shape."""
        return self.down_proj(clamped_glu(self.gate_up_proj(x), self.alpha, self.limit))


class Float32Router(nn.Module):
    """A mixin for transformers' routers that computes scores in float32, whatever the dtype of the model."""

    weight: nn.Parameter
    top_k: int
    #: Whether the weights of a token's experts, which are probabilities of a softmax, add up to 1; None for others.
    normalised: bool | None

    def forward(self, hidden: Tensor) -> Any:
        """A choice of experts for hidden [..., H], as the class computes it: float32, also in an autocast."""
        kind = hidden.device.type
        with nullcontext() if hidden.is_meta else torch.autocast(kind, enabled=False):
            return super().forward(hidden.float())


def split_experts(model: nn.Module) -> None:
    """Replace stacked experts of an empty model by `Experts`, whose weights are empty too, and routers' classes.

    Stacks and routers of another kind stay, as stacks with other activations.
    """
    classes: dict[str, type[nn.Module]] = {}  # the routers of most models differ in nothing
    for name, module in list(model.named_modules()):
        if _has_parts_of_router(module):
            traits = _traits(module)
            if traits not in classes:
                classes[traits] = _router_class(module)
            module.__class__ = classes[traits]
        elif isinstance(module, GptOssExperts) or _is_plain_stack(module):
            model.set_submodule(name, _split(module))


def _has_parts_of_router(module: nn.Module) -> bool:
    """Whether a module has a matrix [E, H] and otherwise vectors of E numbers, and chooses `top_k` experts."""
    weight, chosen = getattr(module, "weight", None), getattr(module, "top_k", None)
    if isinstance(module, nn.Linear) or not isinstance(weight, Tensor) or not isinstance(chosen, int):
        return False
    others = [tensor for tensor in chain(module.parameters(), module.buffers()) if tensor is not weight]
    return weight.ndim == 2 and chosen <= len(weight) and all(tensor.numel() == len(weight) for tensor in others)


def _traits(module: nn.Module) -> str:
    """What decides how a router computes."""
    values = {name: value for name, value in vars(module).items() if isinstance(value, (int, float, str))}
    return repr((type(module), [tensor.shape for tensor in chain(module.parameters(), module.buffers())], values))


@torch.no_grad()
def _router_class(module: nn.Module) -> type[nn.Module]:
    """A router's class with the mixin; its own class for a module that isn't a router."""
    # No name of a class decides, but what it computes of random tokens with random weights.
    kind = type(module)
    generator = torch.Generator().manual_seed(0)
    router: Any = deepcopy(module).to_empty(device="cpu").float()
    for tensor in chain(router.parameters(), router.buffers()):
        tensor.normal_(generator=generator)
    # Scores of some 2: probabilities differ, and the probabilities of experts that aren't chosen count.
    hidden = torch.empty(16, router.weight.shape[1], dtype=torch.float32, device="cpu").normal_(generator=generator)
    hidden *= 2 / hidden.shape[1] ** 0.5
    in_training, weights = (_weights_of_all(router.train(training), hidden) for training in (True, False))
    if in_training is None or weights is None or not torch.equal(in_training, weights):
        return kind
    traits = {"normalised": _normalises(router, hidden, weights)}
    return type(f"Float32{kind.__name__}", (Float32Router, kind), traits)


def _weights_of_all(router: Any, hidden: Tensor) -> Tensor | None:
    """The weights [T, E] of all experts, 0 where one isn't chosen; None if a router takes or gives something else."""
    try:
        outputs = router(hidden.clone())
        [weights] = [one for one in outputs if one.shape == (len(hidden), router.top_k) and one.is_floating_point()]
        [numbers] = [one for one in outputs if one.shape == weights.shape and not one.is_floating_point()]
        return hidden.new_zeros(len(hidden), len(router.weight)).scatter(1, numbers, weights)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


def _normalises(router: Any, hidden: Tensor, weights: Tensor) -> bool | None:
    """Whether the weights that a router has given add up to 1; None if they aren't a softmax's probabilities."""
    scores = reference.scores(hidden, router.weight, getattr(router, "bias", None))
    for normalised in (True, False):
        numbers, probabilities = reference.route(scores, router.top_k, normalised)
        expected = torch.zeros_like(scores).scatter(1, numbers.long(), probabilities)
        if torch.allclose(weights, expected, rtol=0, atol=1e-5):
            return normalised
    return None


def _is_plain_stack(module: nn.Module) -> bool:
    """Whether a module stacks experts that compute down(silu(gate(x)) * up(x)), by transformers' description of it."""
    described = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    return (
        {name for name, _ in module.named_parameters()} == {"gate_up_proj", "down_proj"}
        and all(getattr(module, key, None) is value for key, value in described.items())
        and getattr(getattr(module, "_apply_gate", None), "__name__", None) == "_default_apply_gate"
        and isinstance(getattr(module, "act_fn", None), (nn.SiLU, SiLUActivation))
    )


def _split(stack: nn.Module) -> Experts:
    """Experts of a stack's shapes: gate_up_proj [E, 2 I, H] and down_proj [E, H, I], or gpt-oss's transposed ones."""
    down = stack.get_parameter("down_proj")
    oss = isinstance(stack, GptOssExperts)
    count, *sizes = down.shape
    wide, hidden = sizes if oss else reversed(sizes)

    def linear(columns: int, rows: int) -> nn.Linear:
        return nn.Linear(columns, rows, bias=oss, dtype=down.dtype, device="meta")

    def expert() -> nn.Module:
        if isinstance(stack, GptOssExperts):
            return GptOssExpert(linear(hidden, 2 * wide), linear(wide, hidden), stack.alpha, stack.limit)
        parts = {"gate_proj": linear(hidden, wide), "up_proj": linear(hidden, wide), "down_proj": linear(wide, hidden)}
        return GatedMLP(nn.ModuleDict(parts))

    return Experts(expert() for _ in range(count))


# LoRA on the experts of a mixture: each expert has an adapter of its own for each projection.
#
# The adapters of a projection are one tensor A [experts, r, in] and one B [experts, out, r]: with two matrices for each
# layer, Qwen3-30B-A3B would have 36,864 matrices more for optimizer, norm and copies.


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
        for name in projections:  # A as PEFT draws it for a linear layer, both float32
            layer: Layer = base[0].get_submodule(name)  # type: ignore[assignment]
            down = torch.empty(len(base) * rank, layer.in_features, device=device_of(layer))
            nn.init.kaiming_uniform_(down, a=math.sqrt(5))
            downs[name] = nn.Parameter(down.view(len(base), rank, -1))
            ups[name] = nn.Parameter(torch.zeros(len(base), layer.out_features, rank, device=down.device))
        self.lora_A = nn.ModuleDict({POLICY_ADAPTER: downs})
        self.lora_B = nn.ModuleDict({POLICY_ADAPTER: ups})

    @property
    def lora(self) -> ExpertLora:
        """The adapter, even while it is disabled."""
        both = ("gate_up_proj",) if self.in_stacks else ("gate_proj", "up_proj")
        return ExpertLora(self._loras(*both), self._loras("down_proj"))

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

    def _loras(self, *projections: str) -> list[Lora]:
        """The adapters of projections that read the same input: all of them have one, or none."""
        named = [name for name in projections if name in self.projections]
        return [Lora(self.adapter("A", name), self.adapter("B", name), self.scale) for name in named]


def adapted_experts(model: nn.Module) -> dict[str, AdaptedExperts]:
    """The experts with adapters, by their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedExperts)}
