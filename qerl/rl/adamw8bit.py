"""bitsandbytes' 8-bit AdamW, which updates small tensors together.

bitsandbytes launches a kernel for each tensor and waits for the GPU after each. A small policy has 64 trained tensors,
whose launches and waits take longer than all else that an update's optimizer does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bitsandbytes.optim import AdamW8bit
from torch import Tensor, nn

#: Elements that share a scale of the 8-bit state. A tensor of whole blocks has the same blocks beside others.
BLOCK = 256
#: The most elements of tensors that are updated together, so that copies of them take little memory.
MOST = 2**22


#: The tensors of a state that have an element for each of the parameter's, or for each block.
_STATES = ("state1", "state2", "absmax1", "absmax2")


@dataclass(frozen=True)
class _Joint:
    """Tensors that are updated by one call. Their states are views of `state`, one behind the other."""

    parameters: list[nn.Parameter]
    states: list[dict[str, Any]]
    state: dict[str, Any]
    whole: nn.Parameter
    values: list[Tensor]
    """The parts of `whole`, in the parameters' shapes."""
    gradients: list[Tensor]
    """The parts of its gradient."""

    @property
    def is_valid(self) -> bool:
        """Whether the tensors still have the same number of steps."""
        return all(state["step"] == self.state["step"] for state in self.states)


class JoinedAdamW8bit(AdamW8bit):
    """`AdamW8bit` with the same states and results, bit for bit, in few launches and without waits.

    Tensors of a group with the same kind of state and the same number of steps are copied one behind the other, updated
    by one call and copied back. Their states are stored together, and in checkpoints they are those of single tensors.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        #: By group, what was updated in the last step, with the first moments that it had.
        self._plans: dict[int, tuple[list[Tensor], list[_Joint | nn.Parameter]]] = {}
        self._memory: dict[Any, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """See `AdamW8bit`; without a closure."""
        if closure is not None:
            raise ValueError("an update computes its gradients before the step, so it has no closure")
        if not self.initialized:
            self.check_overrides()
            self.to_gpu()
            self.initialized = True
        for number, group in enumerate(self.param_groups):
            for one in self._plan(number, group):
                self._update(number, group, one)

    def _plan(self, number: int, group: dict[str, Any]) -> list[_Joint | nn.Parameter]:
        """What is updated by one call each: that of the last step, unless gradients or states are others."""
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not trained:
            return []
        moments = [self.state[parameter].get("state1") for parameter in trained]
        known, plan = self._plans.get(number, ([], []))
        same = len(known) == len(moments) and all(a is b for a, b in zip(known, moments, strict=True))
        if not same or not all(one.is_valid for one in plan if isinstance(one, _Joint)):
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None and not self.state[parameter]:
                    self.init_state(group, parameter, number, place)
            plan = [self._joint(one) if len(one) > 1 else one[0] for one in self._together(trained)]
            self._plans[number] = [self.state[parameter]["state1"] for parameter in trained], plan
        return plan

    def _together(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """The parameters in lists of those that are updated together."""
        together: dict[Any, list[nn.Parameter]] = defaultdict(list)
        sizes: dict[Any, int] = defaultdict(int)
        for parameter in parameters:
            assert parameter.grad is not None
            state, size = self.state[parameter], parameter.numel()
            if size % BLOCK or size > MOST:
                yield [parameter]
                continue
            kind = parameter.dtype, parameter.grad.dtype, state["state1"].dtype, state["step"]
            if sizes[kind] + size > MOST:
                yield together.pop(kind)
                sizes[kind] = 0
            together[kind].append(parameter)
            sizes[kind] += size
        yield from together.values()

    def _joint(self, parameters: list[nn.Parameter]) -> _Joint:
        """Move the states of parameters into one."""
        states = [self.state[parameter] for parameter in parameters]
        joint = dict(states[0])
        for name in (name for name in _STATES if name in joint):
            joint[name] = torch.cat([state[name].flatten() for state in states])
            for state, part in zip(states, _parts(joint[name], [state[name] for state in states]), strict=True):
                state[name] = part
        first = parameters[0]
        assert first.grad is not None
        size = sum(parameter.numel() for parameter in parameters)
        whole = nn.Parameter(self._scratch("values", first, size), requires_grad=False)
        whole.grad = self._scratch("gradients", first.grad, size)
        return _Joint(parameters, states, joint, whole, _parts(whole, parameters), _parts(whole.grad, parameters))

    def _scratch(self, name: str, like: Tensor, size: int) -> Tensor:
        """Memory for `size` elements, which all joints share."""
        key = name, like.dtype, like.device
        if key not in self._memory or self._memory[key].numel() < size:
            self._memory[key] = like.new_empty(size)
        return self._memory[key][:size]

    def _update(self, number: int, group: dict[str, Any], one: _Joint | nn.Parameter) -> None:
        if not isinstance(one, _Joint):
            place = next(i for i, parameter in enumerate(group["params"]) if parameter is one)
            self.update_step(group, one, number, place)
            return
        values = [parameter.detach() for parameter in one.parameters]
        torch._foreach_copy_(one.values, values)
        torch._foreach_copy_(one.gradients, [p.grad for p in one.parameters if p.grad is not None])
        self.state[one.whole] = one.state
        try:
            self.update_step({**group, "params": [one.whole]}, one.whole, number, 0)
        finally:
            del self.state[one.whole]
        torch._foreach_copy_(values, one.values)
        for state in one.states:
            state["step"] = one.state["step"]


def _parts(whole: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a flat tensor, one behind the other, in the shapes of `tensors`."""
    parts = whole.detach().split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
