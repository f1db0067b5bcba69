"""The GPU's highest measured bandwidth and FLOP rate, as ceilings for speeds; its clocks, temperature and power."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from statistics import median

import torch

from qerl.results.schema.speed import Ceilings, GpuState

#: Bytes of each of the copy's two buffers, larger than any cache.
COPY_BYTES = 4 * 10**9
#: Rows and columns of both square matrices of the product.
MATMUL_SIZE = 8192
_WARMUP, _REPEATS = 2, 5
#: A field of `gpu_state` and its name in nvidia-smi.
_FIELDS = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "celsius": "temperature.gpu", "watts": "power.draw"}


def ceilings(device: torch.device) -> Ceilings | None:
    """Bytes/s that a copy within the GPU reads and writes, and FLOP/s of a bfloat16 matrix product; None on a CPU.

    The measurement takes less than a second and allocates 2 * `COPY_BYTES` on the GPU.
    """
    if device.type != "cuda":
        return None
    measured = Ceilings(copy_bytes_per_second=_copy(device), matmul_flops_per_second=_matmul(device))
    torch.cuda.empty_cache()
    return measured


def _copy(device: torch.device) -> float:
    source = torch.empty(COPY_BYTES // 8, dtype=torch.int64, device=device).random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _seconds(lambda: target.copy_(source))


def _matmul(device: torch.device) -> float:
    # Zeros would draw less power, and the clocks would stay higher than those of real products.
    left, right = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    return 2 * MATMUL_SIZE**3 / _seconds(lambda: torch.matmul(left, right, out=out))


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    """Median seconds of repeated calls, timed by CUDA events."""
    for _ in range(_WARMUP):
        work()
    taken = []
    for _ in range(_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        taken.append(1e-3 * start.elapsed_time(end))
    return median(taken)


def gpu_state() -> GpuState | None:
    """Current clocks (MHz), temperature (Celsius) and power (W) of this process's GPU; None without a GPU.

    A value that the driver does not report is None.
    """
    if not torch.cuda.is_available():
        return None
    # By UUID: CUDA_VISIBLE_DEVICES renumbers GPUs for CUDA, but not for nvidia-smi.
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    query = ["nvidia-smi", f"--id=GPU-{gpu}", f"--query-gpu={','.join(_FIELDS.values())}"]
    answer = subprocess.run([*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True)
    return parse_state(answer.stdout)


def parse_state(line: str) -> GpuState:
    """`gpu_state` from the line that nvidia-smi prints."""
    values = [value.strip() for value in line.split(",")]
    return GpuState(
        **{
            name: None if value.startswith("[") or value == "N/A" else float(value)
            for name, value in zip(_FIELDS, values, strict=True)
        }
    )
