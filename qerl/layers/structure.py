"""The structure of a decoder: its linear layers, the norms that feed them, and its attention.

A forward pass of the empty model, on the meta device, shows all of them. No name of a model or of a class decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.modeling_layers import GradientCheckpointingLayer

from qerl.layers.delta_net import PACKABLE, PackedDeltaNet
from qerl.layers.empty_model import StructureError, empty_model
from qerl.layers.experts import Experts, Float32Router
from qerl.layers.model_dropout import attention_dropout, check_dropout
from qerl.layers.structure_trace import Trace, is_linear, is_view, traced

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
#: In other models it takes such a name for that of experts.
_SHARED = ("qwen2_moe", "qwen3_5_moe_text")
#: Modules whose parameters are neither linear layers' nor norms'.
_WITH_PARAMETERS = (Float32Router, PackedDeltaNet)


@dataclass(frozen=True)
class Structure:
    """What the blocks of a decoder consist of. Names of their parts are those within a block."""

    blocks: str
    """Name of the list of blocks, such as "model.layers"."""
    head: str
    """Name of the output head, such as "lm_head"."""
    linears: tuple[str, ...]
    """The linear layers that can have adapters, such as "self_attn.q_proj". A block may have some of them.

    Of a shared expert, or of MLPs in blocks without experts, these are layers alone whose adapters stock PEFT loads.
    """
    experts: tuple[str, ...]
    """The linear layers of experts, such as "mlp.experts.0.up_proj". A block may have none."""
    packed: tuple[tuple[str, ...], ...]
    """The linear layers of each block that are quantized: all but those of delta nets and gates of one number."""
    packed_nets: tuple[tuple[str, ...], ...]
    """The layers of each block's delta net that `pack_delta_nets` quantizes too: all but those of b and a."""
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
        of_experts = {name.rpartition(".")[2] for name in self.experts}
        parts = (name.split(".") for name in self.linears)
        return tuple(dict.fromkeys(".".join(part[-2:] if part[-1] in of_experts else part[-1:]) for part in parts))

    def noisy_norms(self) -> dict[str, tuple[int, str]]:
        """Layer and role ("attention", "mlp") of each norm that can be trained and have noise, by its full name."""
        if self.offset is None:
            return {}
        layers = range(len(self.windows))
        return {f"{self.blocks}.{i}.{name}": (i, role) for i in layers for role, name in self.norms.items()}

    def packed_layers(self, pack_delta_nets: bool = False) -> set[str]:
        """Full names of the linear layers that are quantized, with or without those of delta nets."""
        return self._full_names(self.packed) | (self.layers_of_delta_nets() if pack_delta_nets else set())

    def layers_of_delta_nets(self) -> set[str]:
        """Full names of the layers that `pack_delta_nets` quantizes too; none of a model without delta nets."""
        return self._full_names(self.packed_nets)

    def _full_names(self, of_blocks: tuple[tuple[str, ...], ...]) -> set[str]:
        return {f"{self.blocks}.{i}.{name}" for i, names in enumerate(of_blocks) for name in names}


_found: dict[str, Structure] = {}


def structure_of(config: PreTrainedConfig) -> Structure:
    """The structure of a model. Raises `StructureError` if this project doesn't handle it."""
    key = json.dumps({**config.to_dict(), "_name_or_path": "", "class": type(config).__name__}, default=str)
    if key not in _found:
        _found[key] = _find(empty_model(config, torch.float32).eval())
    return _found[key]


def _find(lm: Any) -> Structure:
    kind = lm.config.model_type
    blocks, layers = _blocks(lm, kind)
    for index, block in enumerate(layers):
        _check_parameters(block, f"{blocks}.{index}", kind)
    check_dropout(lm, kind)
    trace = traced(lm, kind)
    windows = tuple(_window(block, f"{blocks}.{index}", trace, kind) for index, block in enumerate(layers))
    if not trace.attention:
        raise StructureError(
            f"model_type={kind!r} isn't supported, because no block has attention, which transformers' cache needs to "
            "count tokens"
        )
    _check_windows(lm.config, windows, kind)
    if not trace.takes_packed_rows and any(map(_delta_net, layers)):
        raise StructureError(f"model_type={kind!r} isn't supported, because its delta nets need packed rows")
    linears = [tuple(name for name in _linears(block) if not _is_gate(block, name)) for block in layers]
    norms = [dict(_norms(block, trace)) for block in layers]
    if any(one != norms[0] for one in norms):
        raise StructureError(f"model_type={kind!r} has blocks that differ in their norms, which isn't supported")
    offsets = {offset_of(block.get_submodule(name)) for block in layers for name in norms[0].values()}
    every = dict.fromkeys(name for names in linears for name in names)
    experts = dict.fromkeys(name for block in layers for name in _linears(block) if _is_within(block, name, Experts))
    if experts and not _reads_each_expert(kind) and not any(map(_has_biased_experts, layers)):
        raise StructureError(
            f"model_type={kind!r} isn't supported, because transformers reads its experts as stacks alone"
        )
    of_experts = set() if kind in _SHARED else {name.rpartition(".")[2] for name in experts}
    return Structure(
        blocks=blocks,
        head=next(name for name, module in lm.named_modules() if module is lm.get_output_embeddings()),
        linears=tuple(n for n in every if n not in experts and n.rpartition(".")[2] not in of_experts),
        experts=tuple(experts),
        packed=tuple(tuple(_packed(block)) for block in layers),
        packed_nets=tuple(tuple(_packed_of_net(block)) for block in layers),
        norms=norms[0],
        offset=offsets.pop() if len(offsets) == 1 else None,
        windows=windows,
        attention_dropout=max(attention_dropout(module) for module in trace.attention),
        takes_packed_rows=trace.takes_packed_rows,
        logit_scale=trace.logit_scale,
        logit_cap=trace.logit_cap,
        block_weights=sum(
            cast(nn.Linear, block.get_submodule(name)).weight.numel()
            for block, names in zip(layers, linears, strict=True)
            for name in names
        ),
    )


def _reads_each_expert(kind: str) -> bool:
    """Whether transformers reads the experts of a kind of models one by one, as dense files here have them."""
    renamings = get_checkpoint_conversion_mapping(kind) or ()
    return any("experts.*." in name for one in renamings for name in one.source_patterns)


def _has_biased_experts(block: nn.Module) -> bool:
    """Whether experts of a block have biases, as those of gpt-oss, whose stacks are packed as published."""
    layers = (layer for module in block.modules() if isinstance(module, Experts) for layer in module.modules())
    return any(isinstance(layer, nn.Linear) and layer.bias is not None for layer in layers)


def _linears(block: nn.Module) -> Iterator[str]:
    return (name for name, module in block.named_modules() if is_linear(module))


def _is_within(block: nn.Module, name: str, kind: type[nn.Module]) -> bool:
    """Whether a module is one of a class, or within one."""
    parts = name.split(".")
    return any(isinstance(block.get_submodule(".".join(parts[:end])), kind) for end in range(1, len(parts) + 1))


def _delta_net(block: nn.Module) -> str | None:
    """Name of the block's delta net."""
    return next((name for name, module in block.named_modules() if isinstance(module, PackedDeltaNet)), None)


def _packed(block: nn.Module) -> Iterator[str]:
    dense = {name for name in _linears(block) if _is_within(block, name, PackedDeltaNet) or _is_gate(block, name)}
    return (name for name in _linears(block) if name not in dense)


def _packed_of_net(block: nn.Module) -> Iterator[str]:
    net = _delta_net(block)
    return (name for name in _linears(block) if net is not None and name in {f"{net}.{part}" for part in PACKABLE})


def _is_gate(block: nn.Module, name: str) -> bool:
    """Whether a linear layer gives one number, as a shared expert's gate does. It is as small as a router.

    A delta net may have one head.
    """
    layer = block.get_submodule(name)
    return isinstance(layer, nn.Linear) and layer.out_features == 1 and not _is_within(block, name, PackedDeltaNet)


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
    for path, module in block.named_modules():
        for part, parameter in module.named_parameters(recurse=False):
            leaf = next(module.children(), None) is None and parameter.ndim == 1 and part in ("weight", "bias")
            known = isinstance(module, nn.Linear) or any(_is_within(block, path, one) for one in _WITH_PARAMETERS)
            if not known and not leaf and part != _SINKS:
                whole = ".".join(filter(None, (name, path, part)))
                raise StructureError(
                    f"model_type={kind!r} isn't supported, because {whole} {list(parameter.shape)} is a "
                    f"parameter of {type(module).__name__}, which is neither nn.Linear nor a norm"
                )
    classes = {part for part in (Experts, Float32Router) if any(isinstance(one, part) for one in block.modules())}
    if classes == {Experts}:  # then the router would be packed and adapted as other linear layers are
        raise StructureError(
            f"model_type={kind!r} isn't supported, because {name} has no module that routes tokens to its "
            "experts by a matrix of scores"
        )


def _window(block: nn.Module, name: str, trace: Trace, kind: str) -> int | None:
    """The sliding window of a block's attention. Raises `StructureError` if packing can't express its attention."""
    calls = [trace.attention[module] for module in block.modules() if module in trace.attention]
    if len(calls) + (_delta_net(block) is not None) != 1:
        raise StructureError(
            f"model_type={kind!r} isn't supported, because {name} doesn't mix tokens by one call of transformers' "
            "attention interface"
        )
    settings = calls[0] if calls else {}
    unknown = sorted(key for key, value in settings.items() if key not in _KNOWN and value not in (None, False))
    causal = settings.get("is_causal") is not False and all(
        getattr(module, "is_causal", True) for module in block.modules()
    )
    if unknown or not causal:
        raise StructureError(
            f"model_type={kind!r} isn't supported, because the attention of {name} "
            + (f"has {unknown[0]}" if unknown else "isn't causal")
        )
    sinks = [p for path, p in block.named_parameters() if path.rpartition(".")[2] == _SINKS]
    if sinks and settings.get("softcap"):
        raise StructureError(f"model_type={kind!r} isn't supported, because {name} has sinks and a soft cap")
    if any(p is not settings.get("s_aux") for p in sinks):
        raise StructureError(f"model_type={kind!r} isn't supported, because attention isn't told the sinks of {name}")
    idle = [path for path, module in block.named_modules() if is_linear(module) and module not in trace.inputs]
    if idle:
        raise StructureError(f"model_type={kind!r} isn't supported, because {name}.{idle[0]} isn't called as a module")
    window = settings.get("sliding_window")
    return None if window is None else int(window)


def _check_windows(config: PreTrainedConfig, windows: tuple[int | None, ...], kind: str) -> None:
    types = getattr(config, "layer_types", None) or []
    if any(type_ == "sliding_attention" and window is None for type_, window in zip(types, windows, strict=False)):
        raise StructureError(
            f"model_type={kind!r} isn't supported, because the attention of its sliding layers isn't told the window"
        )
    # transformers' cache drops tokens by the slice [-window + 1:], which keeps all of them for a window of 1.
    if narrow := [window for window in windows if window is not None and window < 2]:
        raise StructureError(
            f"sliding_window={narrow[0]} isn't supported, because transformers' cache computes wrong log-probabilities "
            "with it; a window has at least 2 tokens: correct config.json"
        )


def _norms(block: nn.Module, trace: Trace) -> Iterator[tuple[str, str]]:
    """Role and name of the block's own norms whose outputs linear layers read."""
    attention = _delta_net(block) or next(n for n, module in block.named_modules() if module in trace.attention)
    taken = set()
    for name, norm in block.named_children():
        if is_linear(norm) or next(norm.children(), None) is not None or not [*norm.parameters()]:
            continue
        out = trace.outputs.get(norm)
        readers = [path for path in _linears(block) if is_view(trace.inputs[block.get_submodule(path)], out)]
        roles = {"attention" if path.startswith(f"{attention}.") else "mlp" for path in readers}
        if roles and min(roles) not in taken:
            taken.add(min(roles))
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
