"""Buffers that keep their contents between launches."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import torch
from torch import Tensor


class Workspace:
    """Buffers in which the thread blocks of a launch exchange sums and counts.

    All launches on a device share them, so no two may run at the same time on different streams.
    """

    def __init__(self, device: torch.device) -> None:
        # Triton's interpreter runs kernels on the CPU.
        gpu = device.type == "cuda"
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count if gpu else 8
        self._device = device
        #: No buffer is ever freed, since captured graphs contain the addresses of those that later were too small.
        self._buffers: dict[str, list[Tensor]] = defaultdict(list)

    def get(self, name: str, count: int, fill: int = 0) -> Tensor:
        """A buffer of at least `count` 32-bit words, which are initially `fill`."""
        buffers = self._buffers[name]
        if not buffers or buffers[-1].numel() < count:
            buffers.append(torch.full((max(count, 1),), fill, dtype=torch.int32, device=self._device))
        return buffers[-1]


@cache
def workspace(device: torch.device) -> Workspace:
    """The buffers of a device."""
    return Workspace(device)
