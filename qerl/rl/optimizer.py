"""AdamW in 8 bits by bitsandbytes' kernels, for many small tensors together and for the shards of a process.

bitsandbytes launches a kernel for each tensor and waits for the GPU after each. A small policy has 64 trained tensors,
whose launches and waits take longer than all else that the optimizer does. So small tensors are updated together.

A moment has a code of 8 bits, and each block of 256 codes a scale. Shards are of whole rows. Where rows are of whole
blocks, a shard thus has the same blocks as the whole weight, however many processes there are. In several processes all
other moments are float32: the moments of vectors, which are few, and of matrices with other rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bitsandbytes import optim
from bitsandbytes.functional import dequantize_blockwise
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor, zeros

#: Elements that share a scale of the 8-bit state. A tensor of whole blocks has the same blocks beside others.
BLOCK = 256
#: The most elements of tensors that are updated together, so that copies of them take little memory.
MOST = 2**22
#: bitsandbytes' names: of the moments' scales, and of the tables of their codes.
_SCALES = {"state1": "absmax1", "state2": "absmax2"}
_TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}


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


class AdamW8bit(optim.AdamW8bit):
    """bitsandbytes' `AdamW8bit` with the same results, bit for bit, in few launches and without waits.

    Tensors of a group with the same kind of state and the same number of steps are copied one behind the other, updated
    by one call and copied back. Their states are stored together, and in checkpoints each tensor has its own.

    Parameters may be DTensors: each process has some of their rows. They are updated one by one, as the whole weight is
    bit for bit if its rows are of whole blocks or if it has less than 4,096 numbers; else its moments aren't quantized.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        #: By group, what was updated in the last step, with the first moments that it had.
        self._plans: dict[int, tuple[list[Tensor], list[_Joint | nn.Parameter]]] = {}
        self._memory: dict[Any, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """See bitsandbytes' optimizer; without a closure."""
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
        """What is updated by one call each: as at the last step, unless gradients or states are others."""
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not trained:
            return []
        moments = [self.state[parameter].get("state1") for parameter in trained]
        known, plan = self._plans.get(number, ([], []))
        same = len(known) == len(moments) and all(a is b for a, b in zip(known, moments, strict=True))
        # A loaded state, or a parameter whose gradient was missing in a step, makes the plan invalid.
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
            # Blocks of quantized moments must not cross from one tensor to the next; large tensors gain nothing.
            if size % BLOCK or size > MOST or isinstance(parameter, DTensor):
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
        for name in (name for name in (*_SCALES, *_SCALES.values()) if name in joint):
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

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """bitsandbytes' settings of a weight, with the number of bits of its moments."""
        config: dict[str, Any] = super().get_config(gindex, pindex, group)
        weight = group["params"][pindex]
        return {**config, "optim_bits": 32} if isinstance(weight, DTensor) and not _whole_blocks(weight) else config

    @torch.no_grad()
    def init_state(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        """Make the moments of a weight, zero."""
        super().init_state(group, p, gindex, pindex)
        state = self.state[p]
        if isinstance(p, DTensor) and state["state1"].dtype == torch.uint8:
            for scale in _SCALES.values():
                state[scale] = zeros(_rows(p), dtype=torch.float32, device_mesh=p.device_mesh, placements=p.placements)

    @torch.no_grad()
    def update_step(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        """Update a weight and its moments. This process may have a part of them."""
        if not isinstance(p, DTensor):
            super().update_step(group, p, gindex, pindex)
            return
        part, state = p.to_local(), self.state[p]
        if not part.numel():  # the weight has fewer rows than there are processes
            return
        assert isinstance(p.grad, DTensor)
        part.grad = p.grad.to_local()
        self.state[part] = {key: _local(key, value) for key, value in state.items()}
        super().update_step(group, part, gindex, pindex)
        state["step"] = self.state.pop(part)["step"]

    def state_dict(self) -> dict[str, Any]:
        """bitsandbytes' state, without the tables of codes, which are constants. Scales have the weights' rows."""
        content: dict[str, Any] = super().state_dict()
        weights = [p for group in self.param_groups for p in group["params"]]
        for number, state in content["state"].items():
            quantized = state.get(self._FSDP_WRAPPED_QUANT_STATE_KEY, {})
            for table in _TABLES:
                quantized.pop(table, None)
            for scale in _SCALES.values():
                if scale in quantized and _whole_blocks(weights[number]):
                    quantized[scale] = quantized[scale].view(_rows(weights[number]))
        return content

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        """Load the state of any number of processes. Blocks of one process that aren't of rows become float32."""
        super().load_state_dict(state_dict, move_to_device)
        for p, state in self.state.items():
            if state["state1"].dtype != torch.uint8:
                continue
            state.update({table: self.name2qmap[name].to(p.device) for table, name in _TABLES.items()})
            if not isinstance(p, DTensor):
                state.update({scale: state[scale].flatten() for scale in _SCALES.values()})
            elif not _whole_blocks(p):
                _unpack(state, p)


def _parts(whole: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a flat tensor, one behind the other, in the shapes of `tensors`."""
    parts = whole.detach().split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _whole_blocks(weight: torch.Tensor) -> bool:
    """Whether the weight's rows are of whole blocks."""
    return weight.ndim > 1 and weight.shape[-1] % BLOCK == 0


def _rows(weight: torch.Tensor) -> tuple[int, ...]:
    """The shape of a weight's scales."""
    return (*weight.shape[:-1], weight.shape[-1] // BLOCK)


def _local(key: str, value: Any) -> Any:
    """The part of a state that this process has; bitsandbytes' kernels take scales as a vector."""
    part = value.to_local() if isinstance(value, DTensor) else value
    return part.view(-1) if key in _SCALES.values() else part


def _unpack(state: dict[str, Any], p: DTensor) -> None:
    """Replace codes, scales and tables by the float32 moments that they stand for."""
    for (moment, scale), table in zip(_SCALES.items(), _TABLES, strict=True):
        codes, scales = state[moment].full_tensor(), state.pop(scale)
        values = dequantize_blockwise(codes, absmax=scales, code=state.pop(table), blocksize=BLOCK)
        state[moment] = distribute_tensor(values, p.device_mesh, p.placements)
