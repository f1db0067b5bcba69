"""Whether flash-linear-attention, which transformers takes where it is installed, can train delta nets on a GPU."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from importlib.util import find_spec

import torch
from packaging.version import Version

from qerl.host.progress import log

#: Versions of Triton, from the first to before the second, whose code for Hopper has wrong gradients (its issue 640).
_WRONG = (Version("3.4.0"), Version("3.7.1"))


@cache
def is_installed() -> bool:
    """Whether transformers finds the library."""
    return find_spec("fla") is not None


def backward_fails(capability: tuple[int, int], triton: str, tilelang: bool) -> bool:
    """Whether the library raises in the gated rule's backward pass on a GPU of that compute capability.

    It does so where its gradients would be wrong: on Hopper with some versions of Triton, unless it has tilelang.
    """
    return capability == (9, 0) and not tilelang and _WRONG[0] <= Version(triton) < _WRONG[1]


@cache
def trains_on(device: torch.device) -> bool:
    """Whether the library computes gradients on a GPU. If it doesn't, the log says so once."""
    triton = version("triton")
    if not backward_fails(torch.cuda.get_device_capability(device), triton, find_spec("tilelang") is not None):
        return True
    log.warning(
        "flash-linear-attention has no correct gradients on this GPU with Triton %s, so updates compute delta nets in "
        "PyTorch: install Triton 3.7.1 or newer, or tilelang, to use its kernels",
        triton,
    )
    return False
