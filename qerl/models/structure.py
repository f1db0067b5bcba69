"""The structure of a decoder, read from its modules and from a trace of its forward pass without weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    __version__,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qerl.models.delta_net import PACKABLE, PackedDeltaNet, use_packed_delta_nets
from qerl.models.experts import Experts, Float32Router, split_experts
from qerl.settings.base import UserError

# The causal language model of a configuration without weights, on the meta device.

#: What transformers raises for values of config.json that don't fit. It checks some of them, and computes with others.
MISFITS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


class StructureError(UserError):
    """A model whose structure this project doesn't handle. The message is one sentence for the user."""


def _unsupported(kind: str, reason: str) -> StructureError:
    return StructureError(f"model_type={kind!r} isn't supported, because {reason}")


def rope_types(config: PreTrainedConfig) -> set[str]:
    """The types of a model's rotary positions. Some models have one for each kind of attention."""
    rope = getattr(config, "rope_parameters", None) or {}
    return {str(one["rope_type"]) for one in (rope, *rope.values()) if isinstance(one, dict) and one.get("rope_type")}


def empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """The causal LM on the meta device, without transformers' quantization and stacks of experts.

    Its delta nets compute packed rows.
    """
    if unknown := rope_types(config) - {*ROPE_INIT_FUNCTIONS, "default"}:
        raise StructureError(
            f"transformers {__version__} has no rotary positions of rope_type={sorted(unknown)[0]!r}; correct "
            "config.json, or install a version that has them"
        )
    config = deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise StructureError(f"transformers has no causal language model for model_type={config.model_type!r}")
    try:
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except MISFITS as error:
        raise StructureError(
            f"transformers makes no model of model_type={config.model_type!r} from the values of config.json "
            f"({type(error).__name__}: {error}); correct them"
        ) from error
    split_experts(lm)
    use_packed_delta_nets(lm)
    return lm


# Dropout of a model's own, which updates don't support: its modules, calls of functions, and attention's.


class Dropouts(TorchFunctionMode):
    """Notes the probability of each dropout that a forward pass computes, in training or not."""

    def __init__(self) -> None:
        super().__init__()
        self.probabilities: set[float] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.dropout:
            self.probabilities.add(kwargs["p"])
        return func(*args, **kwargs)


def check_dropout(lm: nn.Module, kind: str) -> None:
    """Raise `StructureError` for a module of dropout, for one that drops layers, as BioGPT's may, and for jitter.

    Mixtral's jitter multiplies what a mixture reads by random numbers in training. A forward pass finds dropout
    by a function.
    """
    for name, module in lm.named_modules():
        drops = module.p if isinstance(module, nn.Dropout) else getattr(module, "layerdrop", 0.0)
        jitter = getattr(module, "jitter_noise", 0.0)
        for what, probability, key in (("dropout", drops, "its probability"), ("noise", jitter, "router_jitter_noise")):
            if probability > 0:
                raise StructureError(
                    f"model_type={kind!r} has {what} of {probability} in {name}, which updates don't support; set "
                    f"{key} to 0 in config.json"
                )


# What a forward pass of a decoder calls, on the meta device, where it has no weights. Its head reads numbers.

_TRACED = "qerl-structure"
#: Weights of the head in that pass. Logits of small products show the factor, logits of large ones the cap.
_PRODUCTS = torch.logspace(-9, 6, 31, dtype=torch.float64)
#: The last hidden states of its two tokens.
_ONE = torch.ones(1, 2, 1, dtype=torch.float64)


@dataclass
class Trace:
    """What a forward pass calls: attention, linear layers with their inputs, and norms with their outputs."""

    attention: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)
    takes_packed_rows: bool = True
    """Whether each call can be packed: it gets the argument, keys are as wide as values, scores have no soft cap."""
    inputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    outputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    logit_scale: float = 1.0
    logit_cap: float | None = None

    def note(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Note a call of a module, as a forward hook."""
        if inputs and isinstance(output, Tensor):
            self.inputs[module], self.outputs[module] = inputs[0], output


class _Head(nn.Linear):
    """A head with numbers, which leaves what has none as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.is_meta else super().forward(x)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: bool = False,
    **settings: Any,
) -> tuple[Tensor, None]:
    trace = _TRACE.get()
    trace.attention[module] = settings
    # Without the argument, packed attention wouldn't get it either. It has no soft cap.
    trace.takes_packed_rows &= packing and key.shape[-1] == value.shape[-1] and settings.get("softcap") is None
    return query.new_empty(*query.shape[:-1], value.shape[-1]).transpose(1, 2), None


_TRACE: ContextVar[Trace] = ContextVar("trace")
AttentionInterface.register(_TRACED, _attend)
AttentionMaskInterface.register(_TRACED, sdpa_mask)


@torch.inference_mode(False)  # a caller's inference mode refuses in-place operations of some models
@torch.no_grad()
def traced(lm: Any, kind: str) -> Trace:
    """A forward pass over two tokens, with the arguments of `qerl.models.blocks.token_hidden`.

    The head of `lm` is replaced by one that multiplies by `_PRODUCTS`.
    """
    if "position_ids" not in signature(lm.base_model.forward).parameters:
        raise _unsupported(kind, "its forward pass takes no position_ids")
    if not lm._can_set_attn_implementation():
        raise _unsupported(kind, "its attention isn't transformers' interface")
    lm.set_attn_implementation(_TRACED)
    for module in lm.modules():
        if isinstance(getattr(module, "rope_type", None), str):
            module.rope_type = "default"  # others read values of position_ids, which a meta tensor doesn't have
    head = lm.get_output_embeddings()
    probe = _Head(1, len(_PRODUCTS), bias=getattr(head, "bias", None) is not None, dtype=torch.float64)
    for parameter in probe.parameters():
        parameter.copy_(_PRODUCTS.view_as(parameter))
    if isinstance(head, nn.Linear):
        lm.set_submodule(_name_of(lm, head), probe)
    misfit: Exception | None = None
    for settings in ({"packing": True}, {}):
        try:
            return _pass(lm, probe, settings)
        except StructureError:
            raise
        except MISFITS as error:
            misfit = misfit or error
    raise _unsupported(kind, f"its forward pass fails ({misfit})") from misfit


def _pass(lm: Any, head: nn.Module, settings: dict[str, Any]) -> Trace:
    # The head reads 1, unless the model computes the last hidden states by other modules than `token_hidden` does.
    trace, bases, found = Trace(takes_packed_rows=bool(settings)), [], None

    def ones(base: nn.Module, _: Any, output: Any) -> Any:
        bases.append(base)
        return type(output)(last_hidden_state=_ONE)

    hooks = [module.register_forward_hook(trace.note) for module in lm.modules()]
    hooks.append(lm.base_model.register_forward_hook(ones))
    with torch.device("meta"):
        ids, positions = torch.zeros(1, 2, dtype=torch.long), torch.arange(2)[None]
        mask = torch.empty(1, 1, 0, 0, dtype=torch.bool)
    token = _TRACE.set(trace)
    try:
        with Dropouts() as dropouts:
            output = lm(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False, **settings)
        if not output.logits.is_meta:
            found = _scale_and_cap(head(_ONE)[0, 0], output.logits[0, 0])
    except MISFITS:
        if not bases:
            raise
    finally:
        _TRACE.reset(token)
        for hook in hooks:
            hook.remove()
    if found is None:
        raise _unsupported(
            lm.config.model_type,
            "its logits aren't the product of the last hidden states and the head's weight, with or without a factor "
            "and a soft cap",
        )
    trace.logit_scale, trace.logit_cap = found
    if max(dropouts.probabilities, default=0) > 0:
        values = lm.config.to_dict().items()
        keys = [key for key, value in values if "drop" in key and isinstance(value, float) and value > 0]
        raise StructureError(
            f"model_type={lm.config.model_type!r} has dropout of {max(dropouts.probabilities)} outside of attention, "
            f"which updates don't support; set {' and '.join(keys)} to 0 in config.json"
        )
    return trace


def _scale_and_cap(products: Tensor, logits: Tensor) -> tuple[float, float | None] | None:
    """`Structure.logit_scale` and `logit_cap` of logits, given the head's products; None if they aren't such."""
    slope, top = (logits[0] / products[0]).item(), logits[-1].item()
    linear = torch.allclose(logits, slope * products, rtol=1e-5)
    scale, cap = (slope, None) if linear else (slope / top, top)
    fits = linear or torch.allclose(logits, top * (scale * products).tanh(), rtol=1e-5)
    return (scale, cap) if fits and scale > 0 and (cap is None or cap > 0) else None


def is_view(tensor: Tensor, base: Tensor | None) -> bool:
    """Whether a tensor is another one, perhaps in another shape."""
    return base is not None and (tensor is base or tensor._base is base)


# The structure of a decoder: its linear layers, the norms that feed them, and its attention.
#
# A forward pass of the empty model, on the meta device, shows all of them. No name of a model or of a class decides.

#: The kwargs of transformers' attention that don't change what it computes from a mask, or that packed attention reads.
_KNOWN = {
    "dropout",
    "scaling",
    "sliding_window",
    "is_causal",
    "position_ids",
    "use_cache",
    "cache_position",
    "s_aux",
    "softcap",
}
#: The name of attention's parameter of scores that no token has.
_SINKS = "sinks"
#: Values of `model_type` with which stock PEFT is tested to adapt layers beside experts that have names as experts'.
#: In other models it takes such a name for the name of experts' layers.
_SHARED = ("qwen2_moe", "qwen3_5_moe_text")
#: Modules whose parameters are neither linear layers' nor norms'.
_WITH_PARAMETERS = (Float32Router, PackedDeltaNet)


@dataclass(frozen=True)
class Structure:
    """What the blocks of a decoder consist of. Names of their parts are those within a block."""

    kind: str
    """The model_type of config.json."""
    blocks: str
    """Name of the list of blocks, such as "model.layers"."""
    head: str
    """Name of the output head, such as "lm_head"."""
    embedding: str
    """Name of the embedding of tokens, such as "model.embed_tokens"."""
    linears: tuple[str, ...]
    """The linear layers that can have adapters, such as "self_attn.q_proj". A block may have some of them.

    Of a shared expert, or of MLPs in blocks without experts, these are layers alone whose adapters stock PEFT loads.
    """
    experts: tuple[str, ...]
    """The linear layers of experts, such as "mlp.experts.0.up_proj". A block may have none."""
    packed: frozenset[str]
    """Full names of the linear layers that are quantized: all but delta nets' layers and gates of one number."""
    packed_nets: frozenset[str]
    """Full names of the layers of delta nets that can be packed too: all but the layers of b and a."""
    norms: dict[str, str]
    """The norm that the projections of "attention", and of "mlp", read. One norm may feed both: it is attention's.

    A delta net stands where other blocks have attention, and its norm has that role.
    """
    offset: float | None
    """These norms are (offset + w) x / rms(x) with their weights w: 0 or 1. None if they aren't RMSNorms."""
    windows: tuple[int | None, ...]
    """The sliding window of each block's attention, in tokens; None also for a delta net."""
    attention_dropout: float
    """The probability of dropout in attention, which counts in training alone."""
    takes_packed_rows: bool
    """Whether attention takes packed rows. Updates of other models compute padded batches."""
    logit_scale: float
    """What the head's products are multiplied by, as Granite's and Cohere's are."""
    logit_cap: float | None
    """The logits are logit_cap tanh(logit_scale p) of the head's products p, as Gemma 2's; None: logit_scale p."""
    block_weights: int
    """Elements of the weights of all blocks' linear layers, but for routers and gates of one number."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Ends of the linear layers' names, such as "q_proj", or "shared_expert.up_proj" beside experts' "up_proj"."""
        experts, parts = self.expert_layers, (name.split(".") for name in self.linears)
        return tuple(dict.fromkeys(".".join(part[-2:] if part[-1] in experts else part[-1:]) for part in parts))

    @property
    def expert_layers(self) -> tuple[str, ...]:
        """Last parts of the names of each expert's layers, in order, such as "up_proj"."""
        return tuple(dict.fromkeys(map(_end, self.experts)))

    def noisy_norms(self) -> dict[str, tuple[int, str]]:
        """Layer and role ("attention", "mlp") of each norm that can be trained and have noise, by its full name."""
        if self.offset is None:
            return {}
        layers = range(len(self.windows))
        return {f"{self.blocks}.{i}.{name}": (i, role) for i in layers for role, name in self.norms.items()}

    def packed_layers(self, nets: bool = False) -> frozenset[str]:
        """Full names of the linear layers that are quantized, with or without the layers of delta nets."""
        return self.packed | self.packed_nets if nets else self.packed


_structures: dict[str, Structure] = {}


def structure_of(config: PreTrainedConfig) -> Structure:
    """The structure of a model. Raises `StructureError` if this project doesn't handle it."""
    key = json.dumps({**config.to_dict(), "_name_or_path": "", "class": type(config).__name__}, default=str)
    if key not in _structures:
        _structures[key] = _find(empty_model(config, torch.float32).eval())
    return _structures[key]


def _find(lm: Any) -> Structure:
    kind = lm.config.model_type
    blocks, layers = _blocks(lm, kind)
    for index, block in enumerate(layers):
        _check_parameters(block, f"{blocks}.{index}", kind)
    check_dropout(lm, kind)
    trace = traced(lm, kind)
    windows = tuple(_window(block, f"{blocks}.{index}", trace, kind) for index, block in enumerate(layers))
    if not trace.attention:
        raise _unsupported(kind, "no block has attention, which transformers' cache needs to count tokens")
    _check_windows(lm.config, windows, kind)
    if not trace.takes_packed_rows and any(_within(block, PackedDeltaNet) for block in layers):
        raise _unsupported(kind, "its delta nets need packed rows")
    # Persimmon has a module of that name, and GLM takes null.
    dropouts = (getattr(module, "attention_dropout", None) for module in trace.attention)
    norms = [dict(_norms(block, trace)) for block in layers]
    if any(one != norms[0] for one in norms):
        raise StructureError(f"model_type={kind!r} has blocks that differ in their norms, which isn't supported")
    offsets = {offset_of(block.get_submodule(name)) for block in layers for name in norms[0].values()}
    parts = [_parts(block) for block in layers]
    full = {f"{blocks}.{i}.{name}": part for i, block in enumerate(parts) for name, part in block.items()}
    every = {name: part for block in parts for name, part in block.items()}
    experts = tuple(name for name, part in every.items() if part == "expert")
    if experts and not _reads_each_expert(kind) and not any(map(_has_biased_experts, layers)):
        raise _unsupported(kind, "transformers reads its experts as stacks alone")
    expert_ends = set() if kind in _SHARED else set(map(_end, experts))
    return Structure(
        kind=kind,
        blocks=blocks,
        head=_name_of(lm, lm.get_output_embeddings()),
        embedding=_name_of(lm, lm.get_input_embeddings()),
        linears=tuple(name for name in every if name not in experts and _end(name) not in expert_ends),
        experts=experts,
        packed=frozenset(name for name, part in full.items() if part != "delta net"),
        packed_nets=frozenset(name for name, part in full.items() if part == "delta net" and _end(name) in PACKABLE),
        norms=norms[0],
        offset=offsets.pop() if len(offsets) == 1 else None,
        windows=windows,
        attention_dropout=max((one for one in dropouts if isinstance(one, float)), default=0.0),
        takes_packed_rows=trace.takes_packed_rows,
        logit_scale=trace.logit_scale,
        logit_cap=trace.logit_cap,
        block_weights=sum(lm.get_submodule(name).get_parameter("weight").numel() for name in full),
    )


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def _name_of(lm: nn.Module, part: nn.Module) -> str:
    return next(name for name, module in lm.named_modules() if module is part)


def _reads_each_expert(kind: str) -> bool:
    """Whether transformers reads the experts of a kind of models one by one, as dense files here have them."""
    renamings = get_checkpoint_conversion_mapping(kind) or ()
    return any("experts.*." in name for one in renamings for name in one.source_patterns)


def _has_biased_experts(block: nn.Module) -> bool:
    """Whether experts of a block have biases, as in gpt-oss, whose stacks are packed as published."""
    layers = (layer for module in block.modules() if isinstance(module, Experts) for layer in module.modules())
    return any(isinstance(layer, nn.Linear) and layer.bias is not None for layer in layers)


def _linears(block: nn.Module) -> Iterator[str]:
    return (name for name, module in block.named_modules() if isinstance(module, nn.Linear))


def _within(block: nn.Module, *kinds: type[nn.Module]) -> tuple[str, ...]:
    """Prefixes of the names of what is in a block's modules of some classes."""
    return tuple(f"{name}." for name, module in block.named_modules() if isinstance(module, kinds))


def _parts(block: nn.Module) -> dict[str, str]:
    """The linear layers of a block and what each is in: an "expert", a "delta net", or the "block".

    Without those that give one number, as a shared expert's gate does, which is as small as a router. A delta net may
    have one head.
    """
    experts, nets, parts = _within(block, Experts), _within(block, PackedDeltaNet), {}
    for name in _linears(block):
        if name.startswith(nets):
            parts[name] = "delta net"
        elif block.get_submodule(name).out_features != 1:
            parts[name] = "expert" if name.startswith(experts) else "block"
    return parts


def _blocks(lm: Any, kind: str) -> tuple[str, list[nn.Module]]:
    """Name and members of the list of transformer blocks."""
    lists = [
        (name, list(module))
        for name, module in lm.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and all(isinstance(block, GradientCheckpointingLayer) for block in module)
    ]
    if len(lists) != 1:
        raise StructureError(f"model_type={kind!r} has {len(lists)} lists of transformer blocks, and one is supported")
    return lists[0]


def _check_parameters(block: nn.Module, name: str, kind: str) -> None:
    """Raise `StructureError` for a parameter that is in neither a linear layer nor a norm, and for a linear router."""
    known = _within(block, nn.Linear, *_WITH_PARAMETERS)
    for path, module in block.named_modules():
        for part, parameter in module.named_parameters(recurse=False):
            leaf = next(module.children(), None) is None and parameter.ndim == 1 and part in ("weight", "bias")
            if not f"{path}.".startswith(known) and not leaf and part != _SINKS:
                full = ".".join(filter(None, (name, path, part)))
                raise _unsupported(
                    kind,
                    f"{full} {list(parameter.shape)} is a parameter of {type(module).__name__}, which is neither "
                    "nn.Linear nor a norm",
                )
    if _within(block, Experts) and not _within(block, Float32Router):
        # Then the router would be packed and adapted as other linear layers are.
        raise _unsupported(kind, f"{name} has no module that routes tokens to its experts by a matrix of scores")


def _window(block: nn.Module, name: str, trace: Trace, kind: str) -> int | None:
    """The sliding window of a block's attention. Raises `StructureError` if packing can't express its attention."""
    calls = [trace.attention[module] for module in block.modules() if module in trace.attention]
    if len(calls) + bool(_within(block, PackedDeltaNet)) != 1:
        raise _unsupported(kind, f"{name} doesn't mix tokens by one call of transformers' attention interface")
    settings = calls[0] if calls else {}
    if unknown := sorted(key for key, value in settings.items() if key not in _KNOWN and value not in (None, False)):
        raise _unsupported(kind, f"the attention of {name} has {unknown[0]}")
    if settings.get("is_causal") is False or not all(getattr(one, "is_causal", True) for one in block.modules()):
        raise _unsupported(kind, f"the attention of {name} isn't causal")
    sinks = [p for path, p in block.named_parameters() if _end(path) == _SINKS]
    if sinks and settings.get("softcap"):
        raise _unsupported(kind, f"{name} has sinks and a soft cap")
    if any(p is not settings.get("s_aux") for p in sinks):
        raise _unsupported(kind, f"attention isn't told the sinks of {name}")
    if idle := [path for path in _linears(block) if block.get_submodule(path) not in trace.inputs]:
        raise _unsupported(kind, f"{name}.{idle[0]} isn't called as a module")
    window = settings.get("sliding_window")
    return None if window is None else int(window)


def _check_windows(config: PreTrainedConfig, windows: tuple[int | None, ...], kind: str) -> None:
    types = getattr(config, "layer_types", None) or []
    if any(type_ == "sliding_attention" and window is None for type_, window in zip(types, windows, strict=False)):
        raise _unsupported(kind, "the attention of its sliding layers isn't told the window")
    # transformers' cache drops tokens by the slice [-window + 1:], which keeps all of them for a window of 1.
    if narrow := [window for window in windows if window is not None and window < 2]:
        raise StructureError(
            f"sliding_window={narrow[0]} isn't supported, because transformers' cache computes wrong log-probabilities "
            "with it; a window has at least 2 tokens: correct config.json"
        )


def _norms(block: nn.Module, trace: Trace) -> Iterator[tuple[str, str]]:
    """Role and name of the block's own norms whose outputs linear layers read."""
    calls = tuple(f"{name}." for name, module in block.named_modules() if module in trace.attention)
    attention, known = _within(block, PackedDeltaNet) or calls, set()
    for name, norm in block.named_children():
        if isinstance(norm, nn.Linear) or next(norm.children(), None) is not None or not [*norm.parameters()]:
            continue
        out = trace.outputs.get(norm)
        readers = [path for path in _linears(block) if is_view(trace.inputs[block.get_submodule(path)], out)]
        roles = {"attention" if path.startswith(attention) else "mlp" for path in readers}
        if roles and min(roles) not in known:
            known.add(min(roles))
            yield min(roles), name


def epsilon_of(norm: nn.Module) -> Any:
    """What a norm adds to the mean square, as transformers' classes name it; None if there is no such number."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def offset_of(norm: nn.Module) -> float | None:
    """The offset of an RMSNorm's weight, found by a computation on numbers; None for another norm."""
    epsilon = epsilon_of(norm)
    if [name for name, _ in norm.named_parameters()] != ["weight"] or not isinstance(epsilon, float):
        return None
    probe: Any = deepcopy(norm).to_empty(device="cpu").float()
    numbers = torch.arange(2 * probe.weight.numel(), dtype=torch.float32).reshape(2, -1)
    weight, x = numbers[0].cos(), numbers.sin() * 0.01
    probe.weight.data.copy_(weight)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    with torch.no_grad():
        out = probe(x)
    fits = (offset for offset in (0.0, 1.0) if torch.allclose(out, (offset + weight) * normed, rtol=1e-5, atol=1e-6))
    return next(fits, None)
