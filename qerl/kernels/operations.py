"""The implementations of a decode step's operations for a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl.kernels import reference


@dataclass(frozen=True)
class Operations:
    """Norm, GeGLU, attention of decode steps and prompts, and sampling; `qerl.kernels.reference` documents them."""

    name: str
    rms_norm: Callable[..., Tensor]
    geglu: Callable[[Tensor], Tensor]
    attend: Callable[..., Tensor]
    attend_prompts: Callable[..., Tensor]
    draw: Callable[..., None]


def operations_name(on_gpu: bool) -> str:
    """What implements the operations on a GPU or on a CPU."""
    return "Triton" if on_gpu else "PyTorch"


def operations(device: torch.device) -> Operations:
    """Triton's operations on a GPU, PyTorch's elsewhere."""
    name = operations_name(device.type == "cuda")
    if name == "PyTorch":
        ref = reference
        return Operations(name, ref.rms_norm, ref.geglu, ref.attend, ref.attend_prompts, ref.draw)
    from qerl.kernels.attention import attend
    from qerl.kernels.geglu import geglu
    from qerl.kernels.norm import rms_norm
    from qerl.kernels.prompt_attention import attend_prompts
    from qerl.kernels.sampling import draw

    return Operations(name, rms_norm, geglu, attend, attend_prompts, draw)
