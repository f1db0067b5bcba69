"""What a forward pass of a decoder calls, on the meta device, where it has no weights."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import signature
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from qerl.layers.empty_model import MISFITS, StructureError
from qerl.layers.model_dropout import Dropouts, check_calls_of_dropout

_TRACED = "qerl-structure"


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer."""
    return isinstance(module, nn.Linear)


class _Elementwise(TorchDispatchMode):
    """Notes products of tensors with numbers, and tanh."""

    def __init__(self) -> None:
        super().__init__()
        #: What it reads, the number, or None of tanh, and its result.
        self.noted: list[tuple[Tensor, float | None, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor) and isinstance(args[1], (int, float)):
            self.noted.append((args[0], args[1] if func is torch.ops.aten.mul.Tensor else 1 / args[1], out))
        elif func is torch.ops.aten.tanh.default:
            self.noted.append((args[0], None, out))
        return out

    def between(self, before: Tensor, after: Tensor) -> list[float | None] | None:
        """What makes one tensor the other: nothing for the same one or a view; None if other operations do."""
        steps = []
        for tensor, number, result in self.noted:
            if is_view(tensor, before) and not is_view(after, before):
                steps.append(number)
                before = result
        return steps if is_view(after, before) else None


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
    """A forward pass over two tokens, with the arguments of `qerl.layers.attention.token_hidden`."""
    if "position_ids" not in signature(lm.base_model.forward).parameters:
        raise StructureError(f"model_type={kind!r} isn't supported, because its forward pass takes no position_ids")
    if not lm._can_set_attn_implementation():
        raise StructureError(
            f"model_type={kind!r} isn't supported, because its attention isn't transformers' interface"
        )
    lm.set_attn_implementation(_TRACED)
    for module in lm.modules():
        if isinstance(getattr(module, "rope_type", None), str):
            module.rope_type = "default"  # others read values of position_ids, which a meta tensor doesn't have
    misfit: Exception | None = None
    for settings in ({"packing": True}, {}):
        try:
            return _pass(lm, settings)
        except StructureError:
            raise
        except MISFITS as error:
            misfit = misfit or error
    raise StructureError(f"model_type={kind!r} isn't supported, because its forward pass fails ({misfit})") from misfit


def _pass(lm: Any, settings: dict[str, Any]) -> Trace:
    trace, last = Trace(takes_packed_rows=bool(settings)), []
    hooks = [module.register_forward_hook(trace.note) for module in lm.modules()]
    hooks.append(lm.base_model.register_forward_hook(lambda _, __, output: last.append(output.last_hidden_state)))
    with torch.device("meta"):
        ids, positions = torch.zeros(1, 2, dtype=torch.long), torch.arange(2)[None]
        made = torch.empty(1, 1, 0, 0, dtype=torch.bool)
    token = _TRACE.set(trace)
    try:
        with Dropouts() as dropouts, _Elementwise() as noted:
            output = lm(input_ids=ids, position_ids=positions, attention_mask=made, use_cache=False, **settings)
    finally:
        _TRACE.reset(token)
        for hook in hooks:
            hook.remove()
    # `token_hidden` calls this module, which a model that calls its parts alone leaves out.
    trace.logit_scale, trace.logit_cap = _logits_of(lm, trace, last[0] if last else None, output.logits, noted)
    check_calls_of_dropout(dropouts.probabilities, lm.config)
    return trace


def _logits_of(
    lm: Any, trace: Trace, hidden: Tensor | None, logits: Tensor, noted: _Elementwise
) -> tuple[float, float | None]:
    """Scale and cap of the logits, `Structure.logit_scale` and `logit_cap`.

    A factor of the hidden states is one of the logits. Raises `StructureError` if they are computed in another way.
    """
    head = lm.get_output_embeddings()
    read, products = trace.inputs.get(head), trace.outputs.get(head)
    # Operations in place would change the version.
    if read is not None and hidden is not None and is_linear(head) and products is not None and not products._version:
        before, after = noted.between(hidden, read), noted.between(products, logits)
        if (both := _scale_and_cap(before, after, head.bias is not None)) is not None:
            return both
    raise StructureError(
        f"model_type={lm.config.model_type!r} isn't supported, because its logits aren't the product of the last "
        "hidden states and the head's weight, with or without a factor and a soft cap"
    )


def _scale_and_cap(
    before: list[float | None] | None, after: list[float | None] | None, bias: bool
) -> tuple[float, float | None] | None:
    """What the operations before and after the head amount to; None if that isn't a scale and perhaps a cap."""
    # A bias doesn't get a factor of the hidden states.
    if before is None or after is None or None in before or (before and bias):
        return None
    end = after.index(None) if None in after else len(after)
    inner, outer = [*before, *after[:end]], after[end + 1 :]
    if None in outer:
        return None
    scale, cap = (prod(cast(list[float], part), start=1.0) for part in (inner, outer))
    return (scale, cap if None in after else None) if scale > 0 and cap > 0 else None


def is_view(tensor: Tensor, of: Tensor | None) -> bool:
    """Whether a tensor is another one, perhaps in another shape."""
    return of is not None and (tensor is of or tensor._base is of)
