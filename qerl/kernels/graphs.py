"""Work on a GPU, captured in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(work: Callable[[], None], memory: Any = None) -> Callable[[], None]:
    """Capture `work`; the function returned repeats it by one launch, on the tensors that it used now.

    It runs once outside the graph, where kernels are compiled and libraries set up. `memory`: a handle of
    `torch.cuda.graph_pool_handle` for what is allocated on the way.
    """
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory):
        work()
    return graph.replay
