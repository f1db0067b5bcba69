"""Sharding of a policy that is trained in full: each process has a part of every weight (torch's FSDP2).

Gradients and the optimizer's state have the weights' shards. A forward or backward pass gathers the weights of one
block at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

T = TypeVar("T")


class ShardedRoot(nn.Module):
    """The module whose call gathers the weights outside of blocks: embeddings, final norm and head."""

    def __init__(self, lm: PreTrainedModel, dtype: torch.dtype) -> None:
        super().__init__()
        self.lm = lm
        #: The dtype in which passes compute, and in which samplers get the weights.
        self.dtype = dtype

    def forward(self, compute: Callable[[], T]) -> T:
        """Return `compute()`, which reads the weights of `lm`."""
        return compute()

    @staticmethod
    def whole(tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor of which each process may have a shard or an addend."""
        if not isinstance(tensor, DTensor):
            return tensor
        whole: torch.Tensor = tensor.full_tensor()
        return whole


def shard(lm: PreTrainedModel, dtype: torch.dtype, mesh: DeviceMesh | None = None) -> ShardedRoot:
    """Shard the weights of `lm` in place, as float32, over the processes of `mesh`, by default all.

    Passes compute in `dtype`, and gradients add up over the processes in float32. The default process group must
    exist. Each process holds the whole `lm` before, in its present dtype.
    """
    mesh = mesh or init_device_mesh(lm.device.type, (torch.distributed.get_world_size(),))
    root = ShardedRoot(lm, dtype)
    reduced = {} if dtype == torch.float32 else {"param_dtype": dtype, "reduce_dtype": torch.float32}
    precision = MixedPrecisionPolicy(**reduced, cast_forward_inputs=False)
    for block in [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(root, mesh=mesh, mp_policy=precision)
    for module in root.modules():
        if isinstance(module, FSDPModule):  # a sum, because losses are shares of the whole batch's
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root.float()


def gathered(lm: nn.Module, dtypes: dict[str, torch.dtype]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and whole tensor of each weight, in its dtype of `dtypes`; all processes must iterate alike."""
    for name, parameter in lm.named_parameters():
        yield name, ShardedRoot.whole(parameter.detach().to(dtypes[name]))
