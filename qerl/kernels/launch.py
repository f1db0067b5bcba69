"""Programmatic dependent launch: a kernel starts while the one before it ends, and waits before it reads."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

#: Set to False to launch each kernel after the end of the one before it.
ENABLED = True


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """The next kernel may start, which waits like this one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):
    """What the kernels before wrote is read after this call. Every program must call it: later kernels rely on it."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin(PDL: tl.constexpr):
    """Both at once."""
    let_next_start(PDL)
    wait_for_earlier(PDL)


@cache
def _supported(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch on `device`."""
    return {"PDL": True, "launch_pdl": True} if ENABLED and _supported(device) else {"PDL": False}
