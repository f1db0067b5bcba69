"""Capture of GPU work in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(work: Callable[[], None], memory: Any = None) -> Callable[[], None]:
    """Capture `work` in a CUDA graph. The returned function replays it, on the same tensors, by one launch.

    `work` first runs once outside the graph, which compiles kernels and initializes libraries. `memory` is a handle of
    `torch.cuda.graph_pool_handle` for its allocations.
    """
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory):
        work()
    return graph.replay
