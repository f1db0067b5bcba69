"""Compilation of the kernels of a pass, all at the same time, before it runs.

A kernel is otherwise compiled by its first launch, one after another: Triton's take 0.2 to 1.5 s each, of which the C
code of the launcher takes 0.35, and NVRTC's up to 2.5 s. A first GRPO step of 7B has 22 and 9 of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

# The threads of the present rehearsal, and the calls that it has asked for.
_Asked = tuple[ThreadPoolExecutor, dict[Hashable, Future[Any]]]
_asked: ContextVar[_Asked | None] = ContextVar("rehearsal", default=None)


@contextmanager
def rehearsal(device: torch.device) -> Iterator[None]:
    """A block in which launches of this package's kernels on a GPU compile them and run nothing. At its end all are
    compiled and loaded.

    All else runs, on memory that no kernel has written: no number from the block means anything. Raises what the
    compilers raise.
    """
    from triton import AsyncCompileMode

    calls: dict[Hashable, Future[Any]] = {}
    # A new thread's GPU is the first one. Compilers work without Python's lock.
    with ThreadPoolExecutor(os.cpu_count(), initializer=torch.cuda.set_device, initargs=(device,)) as threads:
        token = _asked.set((threads, calls))
        try:
            with AsyncCompileMode(threads) as mode:
                yield
        finally:
            _asked.reset(token)
        # Triton makes a launcher when it is read.
        compiled = [kernel.result() for kernel in mode.future_kernels.values()]
        for call in (*calls.values(), *(threads.submit(getattr, kernel, "run") for kernel in compiled)):
            call.result()


def rehearses() -> bool:
    """Whether launches compile kernels and run nothing."""
    return _asked.get() is not None


def asked_for(load: Callable[..., Any], *arguments: Hashable) -> bool:
    """Whether this is a rehearsal, which then calls `load` in a thread, once for equal arguments."""
    if (asked := _asked.get()) is None:
        return False
    threads, calls = asked
    if (load, arguments) not in calls:
        calls[load, arguments] = threads.submit(load, *arguments)
    return True
