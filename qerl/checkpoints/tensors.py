"""Tensors of checkpoint files, read one at a time and without transformers, whose import takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from qerl.checkpoints.files import CheckpointError, by_shard
from qerl.checkpoints.layouts import FP8_BLOCK, TensorInfo, scale_grid
from qerl.formats.codecs import dequantize, from_checkpoint
from qerl.host.provenance import share
from qerl.settings.models import FormatError


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, with the mode that the umask gives to new files."""
    save_file(tensors, path, metadata={"format": "pt"} if metadata is None else metadata)
    share(path)


def stream(headers: dict[str, TensorInfo], device: torch.device | str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a checkpoint, one shard after the other; NaN and infinity are a `CheckpointError`.

    Weights that the file has in FP8, or packed though no packed layer may be there, are float32.
    """
    for path, names in by_shard(headers).items():
        with safe_open(path, framework="pt", device=str(device)) as shard:
            for name in names:
                yield name, _read(headers[name], shard)


def _read(info: TensorInfo, shard: Any) -> Tensor:
    """A tensor of an open file as `info.reading` says; neither the file's values nor these may be NaN or infinite."""
    if info.place is None:
        tensor = shard.get_tensor(info.stored)
    else:  # its own part of a stack
        stack = shard.get_slice(info.stored)
        part = stack[info.place] if info.rows is None else stack[info.place, slice(*info.rows)]
        tensor = part.reshape(info.shape)
    tensor = finite(info, tensor)
    return tensor if info.reading == "stored" else finite(info, _as_read(info, tensor), " as it is used")


def _as_read(info: TensorInfo, tensor: Tensor) -> Tensor:
    if info.reading == "bytes":
        return tensor.view(torch.uint8)
    if info.reading == "reciprocal":
        if not tensor.all():
            raise CheckpointError(
                f"{info.shard} holds 0 as {info.stored}, by which no weight has a value; download it again"
            )
        return tensor.double().reciprocal().float().reshape(info.shape)
    parts = [_part(part, tensor.device) for part in info.parts]
    if info.reading == "scaled":
        return tensor.float() * _spread(parts[0], tensor.shape)
    named = dict(zip(("weight_packed", "weight_scale", "weight_global_scale"), parts, strict=False))
    try:
        packed = from_checkpoint("nvfp4" if len(parts) == 3 else "mxfp4", named)
    except FormatError as error:
        raise CheckpointError(f"{info.shard}: {info.stored.rpartition('.')[0]}: {error}") from None
    return dequantize(packed, torch.float32)


def _part(info: TensorInfo, device: torch.device) -> Tensor:
    with safe_open(info.shard, framework="pt", device=str(device)) as shard:
        return _read(info, shard)


def _spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """FP8 scales of a tensor, of rows or of blocks, in a shape that multiplies a weight of `shape`."""
    grid = scale_grid(scale.shape, shape)
    assert grid is not None  # `own_layout` has checked it
    each = scale.float().reshape(grid)
    if grid in ((1, 1), (shape[0], 1)):
        return each
    return each.repeat_interleave(FP8_BLOCK, 0)[: shape[0]].repeat_interleave(FP8_BLOCK, 1)[:, : shape[1]]


def converted(info: TensorInfo, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of a checkpoint in `dtype`; `CheckpointError` if it is infinite there."""
    return (
        tensor if tensor.dtype == dtype else finite(info, tensor.to(dtype), f" as {str(dtype).removeprefix('torch.')}")
    )


def finite(info: TensorInfo, tensor: Tensor, use: str = "") -> Tensor:
    """The tensor, which must have neither NaN nor infinity; `use` completes "holds NaN or infinity in NAME"."""
    if tensor.is_floating_point() and tensor.numel():
        # A NaN propagates to both ends. Only 8-bit floats, which are scales, are copied.
        ends = torch.stack(torch.aminmax(tensor.float() if tensor.itemsize == 1 else tensor))
        if not ends.isfinite().all():
            raise CheckpointError(
                f"{info.shard} holds NaN or infinity in {info.stored}{use}; download the checkpoint again"
            )
    return tensor
