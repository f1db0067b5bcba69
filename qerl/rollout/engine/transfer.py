"""Copies of small tensors between host and device that don't wait for the device's queued work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` (a list or array) as a tensor on the device, copied from pinned memory so that the host doesn't wait."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


@dataclass(frozen=True)
class Download:
    """A copy of a tensor to the host, with its values at this point of the device's stream."""

    _host: Tensor
    _event: torch.cuda.Event | None

    @classmethod
    def of(cls, tensor: Tensor) -> Download:
        """Start to copy `tensor`."""
        if tensor.device.type != "cuda":
            return cls(tensor.clone(), None)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return cls(host, event)

    @property
    def arrived(self) -> bool:
        """Whether the copy is complete."""
        return self._event is None or self._event.query()

    def wait(self) -> Tensor:
        """Wait for the copy and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
