"""Tensors of checkpoint files, read one at a time and without transformers, whose import takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from safetensors import safe_open
from torch import Tensor

from qerl.checkpoints.folder import CheckpointError, TensorInfo, by_shard


def stream(headers: dict[str, TensorInfo], device: torch.device | str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a checkpoint, one shard after the other; NaN and infinity are a `CheckpointError`."""
    for path, names in by_shard(headers).items():
        with safe_open(path, framework="pt", device=str(device)) as shard:
            for name in names:
                tensor = shard.get_tensor(name)
                if not _is_finite(tensor):
                    raise CheckpointError(f"{path} holds NaN or infinity in {name}; download the checkpoint again")
                yield name, tensor


def _is_finite(tensor: Tensor) -> bool:
    """Whether a tensor of any dtype has neither NaN nor infinity; only 8-bit floats, which are scales, are copied."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # A NaN propagates to both ends.
    ends = torch.stack(torch.aminmax(tensor.float() if tensor.itemsize == 1 else tensor))
    return bool(ends.isfinite().all())
