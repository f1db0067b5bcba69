"""AdamW in 8 bits for policies that are trained in full: bitsandbytes' kernels on the shards of a process.

A moment has a code of 8 bits, and each block of 256 codes a scale. Shards are of whole rows. Where rows are of whole
blocks, a shard's blocks are thus those of the whole weight, however many processes there are. In several processes all
other moments are float32: those of vectors, of which a model has few, and of matrices with other rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from bitsandbytes.functional import dequantize_blockwise
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor, zeros

from qerl.rl.adamw8bit import BLOCK, JoinedAdamW8bit

#: bitsandbytes' names: of the moments' scales, and of the tables of their codes.
_SCALES = {"state1": "absmax1", "state2": "absmax2"}
_TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}


class ShardedAdamW8bit(JoinedAdamW8bit):
    """`JoinedAdamW8bit` over weights that are whole, or DTensors of which each process has some rows.

    It updates a DTensor as bitsandbytes' `AdamW8bit` updates the whole weight, bit for bit, if its rows are of whole
    blocks, or if it has less than 4,096 numbers. Otherwise a DTensor's moments aren't quantized.
    """

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """bitsandbytes' settings of a weight, with the number of bits of its moments."""
        config: dict[str, Any] = super().get_config(gindex, pindex, group)
        weight = group["params"][pindex]
        return {**config, "optim_bits": 32} if isinstance(weight, DTensor) and not _whole_blocks(weight) else config

    def _together(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """See `JoinedAdamW8bit`; DTensors are updated alone."""
        whole = []
        for parameter in parameters:
            if not isinstance(parameter, DTensor):
                whole.append(parameter)
            else:
                yield [parameter]
        yield from super()._together(whole)

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
        """Update a weight and its moments, of which this process may have a part."""
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
