"""Time and memory of this process."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class Seconds:
    """Filled when the block ends."""

    value: float = 0.0


@contextmanager
def seconds() -> Iterator[Seconds]:
    """Wall-clock seconds of the block, the GPU's work included."""
    elapsed = Seconds()
    _synchronise()
    start = time.perf_counter()
    yield elapsed
    _synchronise()
    elapsed.value = time.perf_counter() - start


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_memory_bytes() -> int:
    """Most memory held so far: on a GPU what its allocator handed out, on a CPU the resident set of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
