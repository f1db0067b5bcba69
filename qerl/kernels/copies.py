"""Copies of many tensors to bfloat16 by one kernel; with different dtypes `torch._foreach_copy_` launches one each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.launch import begin, dependent

_BLOCK = 8192


@triton.jit
def _copy(targets, sources, sizes, BLOCK: tl.constexpr, PDL: tl.constexpr):
    tensor, block = tl.program_id(0), tl.program_id(1)
    begin(PDL)
    size = tl.load(sizes + tensor)
    place = block * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + tensor).to(tl.pointer_type(tl.float32))
    target = tl.load(targets + tensor).to(tl.pointer_type(tl.bfloat16))
    tl.store(target + place, tl.load(source + place, place < size).to(tl.bfloat16), place < size)


class Copies:
    """Copies `sources` (float32) into `targets` (bfloat16) of the same sizes, all contiguous, at each call."""

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        device = targets[0].device
        self._kept_alive = [*targets, *sources]
        self._targets = torch.tensor([tensor.data_ptr() for tensor in targets], device=device)
        self._sources = torch.tensor([tensor.data_ptr() for tensor in sources], device=device)
        self._sizes = torch.tensor([tensor.numel() for tensor in sources], device=device)
        self._grid = len(sources), triton.cdiv(max(tensor.numel() for tensor in sources), _BLOCK)

    def __call__(self) -> None:
        """Copy the present values of the sources."""
        pdl = dependent(self._targets.device)
        _copy[self._grid](self._targets, self._sources, self._sizes, BLOCK=_BLOCK, num_warps=8, **pdl)
