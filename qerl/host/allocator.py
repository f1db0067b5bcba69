"""PyTorch's allocator of GPU memory, configured by the environment before PyTorch uses a GPU."""

from __future__ import annotations

import os
import platform
from collections.abc import MutableMapping

#: The variables by which users configure the allocator; the second is the older name, which all versions read.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"


def join_free_memory(
    environment: MutableMapping[str, str] = os.environ, kernel: str = platform.release().lower()
) -> None:
    """Let the allocator join free parts of GPU memory, so that a large tensor fits where small ones were.

    Without it, a cap leaves gigabytes that are free and not usable: a KV cache finds no whole place between the tensors
    that an update has left. Call it before the process uses a GPU. A configuration by the user stays. WSL's driver
    refuses the calls that this needs, so nothing changes there.
    """
    if "microsoft" not in kernel and not any(name in environment for name in VARIABLES):
        environment[VARIABLES[-1]] = EXPANDABLE
