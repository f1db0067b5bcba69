"""Launches of Triton's kernels: they run nothing in a dry run, and a kernel may start while the previous one ends.

The latter is programmatic dependent launch: the kernel waits before it reads what the previous one wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from qerl.kernels.state import in_dry_run


# A class, because Triton's hook before a compilation writes all constants as JSON, which a kernel's `Shape` can't be.
class _Kernel(JITFunction):
    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return super().run(*args, grid=grid, warmup=warmup or in_dry_run(), **options)


def kernel(function: Callable[..., None] | None = None, **options: Any) -> Any:
    """`triton.jit` for what is launched, and not called by kernels: in a `dry_run` a launch only compiles it."""
    if function is None:
        return partial(kernel, **options)
    # The interpreter compiles nothing.
    return triton.jit(function, **options) if triton.knobs.runtime.interpret else _Kernel(function, **options)


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
