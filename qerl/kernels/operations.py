"""The implementations of a decode step's operations for a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qerl.kernels import reference
from qerl.kernels.state import Groups, Guesses, Norm


@dataclass(frozen=True)
class Operations:
    """Norm, gates of MLPs, attention of decode steps and prompts, and sampling (`qerl.kernels.reference`). Delta
    nets are in `qerl.kernels.reference`, and steps that verify drafts in `qerl.kernels.reference`.
    """

    name: str
    rms_norm: Callable[[Tensor, Norm], Tensor]
    add_normed: Callable[[Tensor, Tensor, Norm, Norm], Tensor]
    clamped_glu: Callable[[Tensor, float, float], Tensor]
    attend: Callable[..., Tensor]
    attend_prompts: Callable[..., Tensor]
    delta_step: Callable[..., Tensor]
    delta_prompts: Callable[..., Tensor]
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
        return _operations(name, ref, ref, ref, ref, reference, ref, reference)
    from qerl.kernels.triton import attention, delta, norms, prompt_attention, sampling

    return _operations(name, norms, norms, attention, prompt_attention, delta, sampling, sampling)


@dataclass(frozen=True)
class MixtureOperations:
    """Operations of a mixture of experts beside its products, documented in `qerl.kernels.reference`."""

    scores: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    route: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
    group: Callable[[Tensor, int], Groups]
    combine: Callable[[Tensor, Tensor, Tensor, bool], None]
    combine_gradients: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def mixture_operations(device: torch.device) -> MixtureOperations:
    """Triton's operations on a GPU, PyTorch's elsewhere."""
    made: Any = reference
    if operations_name(device.type == "cuda") == "Triton":
        from qerl.kernels.triton import experts as made  # type: ignore[no-redef]
    return MixtureOperations(made.scores, made.route, made.group, made.combine, made.combine_gradients)


def _operations(
    name: str, norm: Any, glu: Any, attention: Any, prompts: Any, delta: Any, sampling: Any, drafts: Any
) -> Operations:
    return Operations(
        name=name,
        rms_norm=norm.rms_norm,
        add_normed=norm.add_normed,
        clamped_glu=glu.clamped_glu,
        attend=attention.attend,
        attend_prompts=prompts.attend_prompts,
        delta_step=delta.delta_step,
        delta_prompts=delta.delta_prompts,
        draw=sampling.draw,
        keep=drafts.keep,
        guess=drafts.guess,
        spread=drafts.spread,
        settle=drafts.settle,
    )
