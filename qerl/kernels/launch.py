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
    """Allow the next kernel to start; it waits like this one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):
    """Wait for the kernels before. Every program must call it, since later kernels rely on it."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin(PDL: tl.constexpr):
    """Allow the next kernel to start, and wait for those before."""
    let_next_start(PDL)
    wait_for_earlier(PDL)


@cache
def _supported(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent(device: torch.device) -> dict[str, Any]:
    """Return the arguments of a launch on `device`."""
    return {"PDL": True, "launch_pdl": True} if ENABLED and _supported(device) else {"PDL": False}
