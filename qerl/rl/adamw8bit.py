"""bitsandbytes' 8-bit AdamW, which updates small tensors together.

bitsandbytes launches a kernel for each tensor and waits for the GPU after each. A small policy has 64 trained tensors,
whose launches and waits take longer than all else that an update's optimizer does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from bitsandbytes.optim import AdamW8bit
from torch import Tensor, nn

#: Elements that share a scale of the 8-bit state. A tensor of whole blocks has the same blocks beside others.
BLOCK = 256
#: The most elements of tensors that are updated together, so that copies of them take little memory.
MOST = 2**22


class JoinedAdamW8bit(AdamW8bit):
    """`AdamW8bit` with the same states and results, bit for bit, in few launches and without waits.

    Tensors of a group with the same kind of state and the same number of steps are copied one behind the other, updated
    by one call and copied back. States stay those of the single tensors, so checkpoints do too.
    """

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
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None and not self.state[parameter]:
                    self.init_state(group, parameter, number, place)
            for tensors in self._joined(group["params"]):
                self._update(number, group, tensors)

    def _joined(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """The parameters with a gradient, in lists of those that are updated together."""
        together: dict[Any, list[nn.Parameter]] = defaultdict(list)
        sizes: dict[Any, int] = defaultdict(int)
        for parameter in parameters:
            if parameter.grad is None:
                continue
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

    def _update(self, number: int, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        if len(parameters) == 1:
            place = next(i for i, one in enumerate(group["params"]) if one is parameters[0])
            self.update_step(group, parameters[0], number, place)
            return
        states = [self.state[parameter] for parameter in parameters]
        names = [name for name in ("state1", "state2", "absmax1", "absmax2") if name in states[0]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        whole = nn.Parameter(_behind(parameters), requires_grad=False)
        whole.grad = _behind(gradients)
        self.state[whole] = {**states[0], **{name: _behind([state[name] for state in states]) for name in names}}
        try:
            self.update_step({**group, "params": [whole]}, whole, number, 0)
            made = self.state[whole]
            _copy_back(whole, parameters)
            for name in names:
                _copy_back(made[name], [state[name] for state in states])
            for state in states:
                state["step"] = made["step"]
        finally:
            del self.state[whole]


def _behind(tensors: Iterable[Tensor]) -> Tensor:
    """The elements of tensors one behind the other."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _copy_back(whole: Tensor, tensors: list[Any]) -> None:
    parts = whole.detach().split([tensor.numel() for tensor in tensors])
    shaped = [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
    torch._foreach_copy_([tensor.detach() for tensor in tensors], shaped)
