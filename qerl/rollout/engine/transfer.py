"""Small tensors between host and device without a wait for what the device still has to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` (a list or an array) on the device. From pageable memory the host would wait for the stream."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


@dataclass(frozen=True)
class Download:
    """A tensor on its way to the host: what it holds when the device comes to this point of its stream."""

    _host: Tensor
    _event: torch.cuda.Event | None

    @classmethod
    def of(cls, tensor: Tensor) -> Download:
        """Begin to fetch `tensor`."""
        if tensor.device.type != "cuda":
            return cls(tensor.clone(), None)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return cls(host, event)

    @property
    def arrived(self) -> bool:
        """Whether it is here."""
        return self._event is None or self._event.query()

    def wait(self) -> Tensor:
        """The tensor, once it is here."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
