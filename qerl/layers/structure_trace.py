"""What a forward pass of a decoder calls, on the meta device, where it has no weights."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

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


class _Scalings(TorchDispatchMode):
    """Notes products of tensors with numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Tensor, float, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor) and isinstance(args[1], (int, float)):
            self.noted.append((args[0], args[1] if func is torch.ops.aten.mul.Tensor else 1 / args[1], out))
        return out

    def factor(self, before: Tensor, after: Tensor) -> float | None:
        """What makes one tensor the other: 1 for the same one or a view; None if it isn't a product with numbers."""
        scale = 1.0
        for tensor, number, product in self.noted:
            if is_view(tensor, before) and not is_view(after, before):
                scale, before = scale * number, product
        return scale if is_view(after, before) else None


@dataclass
class Trace:
    """What a forward pass calls: attention, linear layers with their inputs, and norms with their outputs."""

    attention: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)
    takes_packed_rows: bool = True
    """Whether each call can be packed: it gets the argument, and keys are as wide as values for flash attention."""
    inputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    outputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    logit_scale: float = 1.0

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
    # Without the argument, packed attention wouldn't get it either.
    trace.takes_packed_rows &= packing and key.shape[-1] == value.shape[-1]
    return query.new_empty(*query.shape[:-1], value.shape[-1]).transpose(1, 2), None


_TRACE: ContextVar[Trace] = ContextVar("trace")
AttentionInterface.register(_TRACED, _attend)
AttentionMaskInterface.register(_TRACED, sdpa_mask)


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
        with Dropouts() as dropouts, _Scalings() as scalings:
            output = lm(input_ids=ids, position_ids=positions, attention_mask=made, use_cache=False, **settings)
    finally:
        _TRACE.reset(token)
        for hook in hooks:
            hook.remove()
    # `token_hidden` calls this module, which a model that calls its parts alone leaves out.
    trace.logit_scale = _logit_scale(lm, trace, last[0] if last else None, output.logits, scalings)
    check_calls_of_dropout(dropouts.probabilities, lm.config)
    return trace


def _logit_scale(lm: Any, trace: Trace, hidden: Tensor | None, logits: Tensor, scalings: _Scalings) -> float:
    """What the product of the last hidden states and the head's weight is multiplied by to give the logits.

    A factor of the hidden states is one of the logits. Raises `StructureError` if they are computed in another way.
    """
    head = lm.get_output_embeddings()
    read = trace.inputs.get(head)
    before = after = None
    if read is not None and hidden is not None:
        before, after = scalings.factor(hidden, read), scalings.factor(trace.outputs[head], logits)
    scale = (before or 0.0) * (after or 0.0)
    if scale <= 0 or not is_linear(head) or head.bias is not None:
        raise StructureError(
            f"model_type={lm.config.model_type!r} isn't supported, because its logits aren't the product of the last "
            "hidden states and the head's weight"
        )
    return scale


def is_view(tensor: Tensor, of: Tensor | None) -> bool:
    """Whether a tensor is another one, perhaps in another shape."""
    return of is not None and (tensor is of or tensor._base is of)
