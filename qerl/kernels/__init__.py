"""CUDA and Triton kernels of decode steps, prefill and updates, and reference implementations in PyTorch."""

from types import ModuleType

import torch


def operations_name(on_gpu: bool) -> str:
    """What implements the operations of `qerl.kernels.reference` on a GPU or on a CPU."""
    return "Triton" if on_gpu else "PyTorch"


def operations(device: torch.device) -> ModuleType:
    """The module with the operations of a device. Both modules have the same functions, with the same parameters."""
    if device.type == "cuda":
        from qerl.kernels import triton

        return triton
    from qerl.kernels import reference

    return reference
