"""Time and memory of this process."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

PROCESS = Path("/proc/self")


@dataclass
class Seconds:
    """The seconds of a block, set when the block ends."""

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


def cap_memory(gigabytes: float) -> None:
    """Let this process allocate no more than so many GB (10^9 bytes) on its GPU; call it before the first allocation.

    ValueError on a machine without a GPU, or with a smaller one.
    """
    if not torch.cuda.is_available():
        raise ValueError("memory can be capped on a GPU only; leave the cap away")
    _, total = torch.cuda.mem_get_info()
    if gigabytes * 1e9 > total:
        raise ValueError(f"this GPU has {total / 1e9:.0f} GB, less than the cap of {gigabytes:g}; lower the cap")
    torch.cuda.set_per_process_memory_fraction(gigabytes * 1e9 / total)


def allocatable_bytes() -> int:
    """What this process can still allocate on its GPU: free memory and what its allocator holds unused; under a cap."""
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    cap = int(torch.cuda.get_per_process_memory_fraction() * total)
    return min(free, max(cap - reserved, 0)) + reserved - torch.cuda.memory_allocated()


def peak_memory_bytes() -> int:
    """Most memory held since the start or the last reset.

    On a GPU this is the memory that its allocator handed out, on a CPU the process's resident set (Linux: proc(5)).
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    lines = (PROCESS / "status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024


def reset_peak_memory(collect: bool = True) -> None:
    """Let `peak_memory_bytes` start anew from what is held now.

    `collect`: without garbage; that takes tenths of a second, too much where time is measured too.
    """
    if collect:
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        (PROCESS / "clear_refs").write_text("5")
