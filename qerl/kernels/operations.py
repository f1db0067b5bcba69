"""The implementations of a decode step's operations for a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qerl.kernels import drafts_reference, reference
from qerl.kernels.draft_state import Guesses


@dataclass(frozen=True)
class Operations:
    """Norm, gates of MLPs, attention of decode steps and prompts, and sampling (`qerl.kernels.reference`). Then those
    of steps that verify drafts, in `qerl.kernels.drafts_reference`.
    """

    name: str
    rms_norm: Callable[..., Tensor]
    geglu: Callable[[Tensor], Tensor]
    clamped_glu: Callable[[Tensor, float, float], Tensor]
    attend: Callable[..., Tensor]
    attend_prompts: Callable[..., Tensor]
    draw: Callable[..., None]
    keep: Callable[..., None]
    guess: Callable[..., Guesses]
    spread: Callable[..., None]
    settle: Callable[..., None]


def operations_name(on_gpu: bool) -> str:
    """What implements the operations on a GPU or on a CPU."""
    return "Triton" if on_gpu else "PyTorch"


def operations(device: torch.device) -> Operations:
    """Triton's operations on a GPU, PyTorch's elsewhere."""
    name = operations_name(device.type == "cuda")
    if name == "PyTorch":
        ref = reference
        return _operations(name, ref, ref, ref, ref, ref, drafts_reference)
    from qerl.kernels import attention, drafts, geglu, norm, prompt_attention, sampling

    return _operations(name, norm, geglu, attention, prompt_attention, sampling, drafts)


def _operations(
    name: str, norm: Any, geglu: Any, attention: Any, prompts: Any, sampling: Any, drafts: Any
) -> Operations:
    return Operations(
        name=name,
        rms_norm=norm.rms_norm,
        geglu=geglu.geglu,
        clamped_glu=geglu.clamped_glu,
        attend=attention.attend,
        attend_prompts=prompts.attend_prompts,
        draw=sampling.draw,
        keep=drafts.keep,
        guess=drafts.guess,
        spread=drafts.spread,
        settle=drafts.settle,
    )
