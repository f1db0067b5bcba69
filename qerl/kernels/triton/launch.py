"""Programmatic dependent launch: a kernel starts while the previous one ends, and waits before it reads."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

#: If False, each kernel is launched after the end of the previous one.
ENABLED = True


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Allow the next kernel to start; it waits for this one in `wait_for_earlier`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):
    """Wait for earlier kernels. Every program must call it, since later kernels rely on it."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin(PDL: tl.constexpr):
    """Allow the next kernel to start, and wait for earlier ones."""
    let_next_start(PDL)
    wait_for_earlier(PDL)


@cache
def _supported(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent(device: torch.device) -> dict[str, Any]:
    """Keyword arguments for a launch on `device`."""
    return {"PDL": True, "launch_pdl": True} if ENABLED and _supported(device) else {"PDL": False}
