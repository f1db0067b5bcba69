"""The GPUs of this machine by NVML, and what this project doesn't support of them, as one sentence."""

from __future__ import annotations

from dataclasses import dataclass

import pynvml
import torch

from qerl.host.gpu_lease import LEAST_CAPABILITY, VISIBLE, devices
from qerl.settings.base import ConfigError


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use; memory is in bytes."""

    name: str
    capability: tuple[int, int]
    total: int
    free: int


def visible_gpus() -> list[Gpu]:
    """The NVIDIA GPUs that this process may use, without CUDA's context; empty without a driver."""
    uuids = devices()
    if not uuids:
        return []
    pynvml.nvmlInit()
    try:
        return [_gpu(pynvml.nvmlDeviceGetHandleByUUID(uuid)) for uuid in uuids.values()]
    except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
        raise ConfigError(f"{VISIBLE} names a GPU that this machine doesn't have; correct it") from None
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: object) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    name = pynvml.nvmlDeviceGetName(handle)
    return Gpu(name, (major, minor), int(memory.total), int(memory.free))


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
