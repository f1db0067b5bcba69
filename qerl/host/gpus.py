"""Accelerators that this project doesn't support; time and memory of this process."""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from qerl.host.lease import LEAST_CAPABILITY


def too_old(name: str, capability: tuple[int, int]) -> str | None:
    """Why an NVIDIA GPU isn't supported, and what works instead; None if it is supported."""
    if capability >= LEAST_CAPABILITY:
        return None
    least = ".".join(map(str, LEAST_CAPABILITY))
    version = ".".join(map(str, capability))
    return (
        f"{name} has compute capability {version}, and the kernels need {least} (Ampere) or newer; "
        "hide it by CUDA_VISIBLE_DEVICES= to train and sample small models on the CPU, or serve a model there by vLLM"
    )


def unsupported_accelerator() -> str | None:
    """Why this machine's accelerator of another maker isn't supported, and what works instead; None without one."""
    if torch.version.hip is not None:
        return (
            "AMD's GPUs aren't supported, as the kernels are made for NVIDIA's; install a CPU build of PyTorch to "
            "train and sample small models on the CPU, or serve a model there by vLLM"
        )
    if torch.backends.mps.is_available():
        return "Apple's GPU isn't supported; small models train and sample on the CPU instead"
    return None


# Time and memory of this process.

PROCESS = Path("/proc/self")


@dataclass
class Seconds:
    """The seconds of a `with` block, set when it ends."""

    value: float = 0.0


class _LeftOut(threading.local):
    seconds = 0.0


_LEFT_OUT = _LeftOut()


def leave_out(taken: float) -> None:
    """Leave seconds that were somebody else's out of the blocks that this thread measures now."""
    _LEFT_OUT.seconds += taken


@contextmanager
def seconds() -> Iterator[Seconds]:
    """Measure the wall-clock seconds of a block, including its work on the GPU, without the blocks of `leave_out`."""
    elapsed = Seconds()
    _synchronise()
    start, before = time.perf_counter(), _LEFT_OUT.seconds
    yield elapsed
    _synchronise()
    elapsed.value = time.perf_counter() - start - (_LEFT_OUT.seconds - before)


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# The KV cache and the choice of what to recompute follow the cap, so that a larger GPU can stand in for a smaller one.
def cap_memory(gigabytes: float) -> None:
    """Limit this process's GPU memory to `gigabytes` (10^9 bytes); call it before the first allocation.

    CUDA's own context, some half a gigabyte, isn't counted. Raises ValueError on a machine without a GPU, or with a
    smaller one.
    """
    if not torch.cuda.is_available():
        raise ValueError("only a GPU's memory can be capped; remove the cap")
    _, total = torch.cuda.mem_get_info()
    if gigabytes * 1e9 > total:
        raise ValueError(f"this GPU has {total / 1e9:.0f} GB, less than the cap of {gigabytes:g}; lower the cap")
    torch.cuda.set_per_process_memory_fraction(gigabytes * 1e9 / total)


#: The allocator's pool of everything that isn't captured in a CUDA graph.
DEFAULT_POOL = (0, 0)


def allocatable_bytes() -> int:
    """Bytes that this process can still allocate on its GPU within its cap: free memory and unused reserved memory.

    Memory that the allocator reserved for CUDA graphs doesn't count: graphs alone can use it.
    """
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    cap = int(torch.cuda.get_per_process_memory_fraction() * total)
    # What is reserved in the allocator's private pools, which CUDA graphs have, and not allocated.
    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != DEFAULT_POOL]
    of_graphs = sum(s["total_size"] - s["allocated_size"] for s in segments)
    unused = reserved - torch.cuda.memory_allocated() - of_graphs
    return min(free, max(cap - reserved, 0)) + unused


def peak_memory_bytes() -> int:
    """The peak of memory since the start or the last reset, in bytes.

    On a GPU this is the allocated memory, on a CPU the process's resident set (Linux: proc(5)).
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    lines = (PROCESS / "status").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024


def free_memory(error: BaseException | None = None) -> None:
    """Free what nothing refers to, cycles included, and return PyTorch's unused memory to the GPU.

    An `error` that is kept keeps the variables of the calls that it ended, such as a policy: these are cleared.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reset_peak_memory(collect: bool = True) -> None:
    """Reset `peak_memory_bytes` to the present memory.

    `collect` first collects garbage, which takes tenths of a second and so disturbs measurements of time.
    """
    if collect:
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        (PROCESS / "clear_refs").write_text("5", encoding="utf-8")
