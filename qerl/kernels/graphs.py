"""Capture of GPU work in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def capture(work: Callable[[], None], memory: Any = None) -> Callable[[], None]:
    """Capture `work`, which has run before, in a CUDA graph. The returned function replays it on the same tensors.

    `memory` is a handle of `torch.cuda.graph_pool_handle` for its allocations.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory):
        work()
    return graph.replay


def captured(work: Callable[[], None], memory: Any = None) -> Callable[[], None]:
    """Run `work` once, which compiles kernels and initializes libraries, then `capture` it."""
    work()
    return capture(work, memory)
