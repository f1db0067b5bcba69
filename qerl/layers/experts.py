"""The experts of a mixture as linear layers, which can be packed one by one, and its router in float32.

transformers stacks the weights of a block's experts in two tensors. Most checkpoints, and llmcompressor's and
ModelOpt's, have three linear layers an expert, and so have these modules, under the same names. gpt-oss has two.
`qerl.checkpoints.layouts` splits the stacks of its files and of Qwen3.5's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from qerl.kernels import mixture_reference
from qerl.kernels.operations import mixture_operations
from qerl.layers.grouped_linear import GroupedLinear, Layer, grouped, weighted_sum
from qerl.layers.grouped_lora import ExpertFactors, adapted_product
from qerl.layers.mlp import GatedMLP, clamped_glu, swiglu_of_halves


@dataclass(frozen=True)
class ExpertProducts:
    """The grouped products of a block's experts: `down` reads the activation of what `gate_up` makes."""

    gate_up: GroupedLinear
    down: GroupedLinear
    clamped: tuple[float, float] | None
    """alpha and limit of the clamped GLU between them; None for silu(first half) * second half, which `gate_up` has."""


@dataclass(frozen=True)
class ExpertLora:
    """Adapters of the grouped products of a block's experts, None of a product without them."""

    gate_up: ExpertFactors | None = None
    down: ExpertFactors | None = None


class Experts(nn.ModuleList):
    """The experts of a block. A token's output is the weighted sum of those that it is routed to."""

    def __init__(self, *modules: Any) -> None:
        super().__init__(*modules)
        self._products: dict[torch.dtype, ExpertProducts] = {}

    def products(self, dtype: torch.dtype) -> ExpertProducts:
        """The experts' frozen layers as grouped products with activations of `dtype`, made once.

        On a GPU the experts' weights move into one tensor for each of the two.
        """
        if dtype not in self._products:
            self._products[dtype] = _products(list(self), dtype)
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
        products, groups = self.products(dtype), mixture_operations(hidden.device).group(chosen.int(), len(self))
        lora = lora or ExpertLora()
        both = adapted_product(hidden.to(dtype), groups, products.gate_up, lora.gate_up)
        inner = clamped_glu(both, *products.clamped) if products.clamped else swiglu_of_halves(both)
        out = adapted_product(inner, groups, products.down, lora.down)
        return weighted_sum(out, weights.float()).to(hidden.dtype)

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


def _products(experts: list[nn.Module], dtype: torch.dtype) -> ExpertProducts:
    first = experts[0]
    parts = ("gate_proj", "up_proj") if isinstance(first, GatedMLP) else ("gate_up_proj",)
    clamped = (first.alpha, first.limit) if isinstance(first, GptOssExpert) else None
    layers = [[cast(Layer, expert.get_submodule(part)) for part in parts] for expert in experts]
    down = [[cast(Layer, expert.get_submodule("down_proj"))] for expert in experts]
    return ExpertProducts(grouped(layers, dtype), grouped(down, dtype), clamped)


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
        elif isinstance(module, GptOssExperts):
            model.set_submodule(name, _split_gpt_oss(module))
        elif _is_plain_stack(module):
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
    """A router's class with the mixin; its own class for a module that isn't a router.

    It computes random tokens with random weights, so no name of a class decides.
    """
    kind = type(module)
    generator = torch.Generator().manual_seed(0)
    router: Any = deepcopy(module).to_empty(device="cpu").float()
    for tensor in chain(router.parameters(), router.buffers()):
        tensor.normal_(generator=generator)
    # Scores of some 2: probabilities differ, and those of the experts that aren't chosen count.
    hidden = torch.empty(16, router.weight.shape[1], dtype=torch.float32, device="cpu").normal_(generator=generator)
    hidden *= 2 / hidden.shape[1] ** 0.5
    in_training, weights = (_weights_of_all(router.train(training), hidden) for training in (True, False))
    if in_training is None or weights is None or not torch.equal(in_training, weights):
        return kind
    traits = {"normalised": _normalises(router, hidden, weights)}
    return type(f"Float32{kind.__name__}", (Float32Router, kind), traits)


def _weights_of_all(router: Any, hidden: Tensor) -> Tensor | None:
    """The weights [T, E] of all experts, of which a router chooses some; None if it takes or gives something else."""
    try:
        given = router(hidden.clone())
        [weights] = [one for one in given if one.shape == (len(hidden), router.top_k) and one.is_floating_point()]
        [numbers] = [one for one in given if one.shape == weights.shape and not one.is_floating_point()]
        return hidden.new_zeros(len(hidden), len(router.weight)).scatter(1, numbers, weights)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


def _normalises(router: Any, hidden: Tensor, given: Tensor) -> bool | None:
    """Whether the weights that a router has given add up to 1; None if they aren't a softmax's probabilities."""
    scores = mixture_reference.scores(hidden, router.weight, getattr(router, "bias", None))
    for normalised in (True, False):
        numbers, weights = mixture_reference.route(scores, router.top_k, normalised)
        expected = torch.zeros_like(scores).scatter(1, numbers.long(), weights)
        if torch.allclose(given, expected, rtol=0, atol=1e-5):
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
    """Experts of a stack's shapes: gate_up_proj [E, 2 I, H] and down_proj [E, H, I]."""
    down = stack.get_parameter("down_proj")
    count, hidden, wide = down.shape
    made: dict[str, Any] = {"bias": False, "dtype": down.dtype, "device": "meta"}
    shapes = {"gate_proj": (hidden, wide), "up_proj": (hidden, wide), "down_proj": (wide, hidden)}
    experts = ({name: nn.Linear(*shape, **made) for name, shape in shapes.items()} for _ in range(count))
    return Experts(GatedMLP(nn.ModuleDict(expert)) for expert in experts)


def _split_gpt_oss(stack: GptOssExperts) -> Experts:
    """Experts of a stack's shapes: gate_up_proj [E, H, 2 I] and down_proj [E, I, H]."""
    count, wide, hidden = stack.down_proj.shape
    made: dict[str, Any] = {"bias": True, "dtype": stack.down_proj.dtype, "device": "meta"}
    return Experts(
        GptOssExpert(nn.Linear(hidden, 2 * wide, **made), nn.Linear(wide, hidden, **made), stack.alpha, stack.limit)
        for _ in range(count)
    )
