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
from qerl.checkpoints.layouts import FP8_BLOCK, TensorInfo, blocks_of, is_of_rows
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
    tensor = _as_read(info, finite(info, _stored(info, shard)))
    return tensor if info.reading == "stored" else finite(info, tensor, " as it is used")


def _as_read(info: TensorInfo, tensor: Tensor) -> Tensor:
    if info.reading == "reciprocal":
        return _reciprocal(info, tensor)
    if info.reading == "bytes":
        return tensor.view(torch.uint8)
    if info.reading == "scaled":
        return tensor.float() * _spread(_part(info.parts[0], tensor.device), tensor.shape)
    if info.reading == "unpacked":
        names = ("weight_packed", "weight_scale", "weight_global_scale")
        parts = dict(zip(names, (_part(part, tensor.device) for part in info.parts), strict=False))
        try:
            packed = from_checkpoint("nvfp4" if len(parts) == len(names) else "mxfp4", parts)
        except FormatError as error:
            raise CheckpointError(f"{info.shard}: {info.stored.rpartition('.')[0]}: {error}") from None
        return dequantize(packed, torch.float32)
    return tensor


def _reciprocal(info: TensorInfo, tensor: Tensor) -> Tensor:
    if not tensor.all():
        raise CheckpointError(
            f"{info.shard} holds 0 as {info.stored}, by which no weight has a value; download it again"
        )
    return tensor.double().reciprocal().float().reshape(info.shape)


def _spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """An FP8 scale of a tensor, of rows or of blocks in a shape that multiplies a weight of `shape`."""
    if scale.numel() == 1 or is_of_rows(tuple(scale.shape), shape[0]):
        return scale.float().reshape(-1, 1)
    blocks = scale.float().reshape(blocks_of(shape))
    return blocks.repeat_interleave(FP8_BLOCK, 0)[: shape[0]].repeat_interleave(FP8_BLOCK, 1)[:, : shape[1]]


def _part(info: TensorInfo, device: torch.device) -> Tensor:
    with safe_open(info.shard, framework="pt", device=str(device)) as shard:
        return _read(info, shard)


def _stored(info: TensorInfo, shard: Any) -> Tensor:
    """The tensor of an open file, or its own part of a stack."""
    tensor: Tensor
    if info.place is None:
        tensor = shard.get_tensor(info.stored)
        return tensor
    stack = shard.get_slice(info.stored)
    tensor = stack[info.place] if info.rows is None else stack[info.place, slice(*info.rows)]
    return tensor.reshape(info.shape)


def converted(info: TensorInfo, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of a checkpoint in `dtype`; `CheckpointError` if it is infinite there."""
    return (
        tensor if tensor.dtype == dtype else finite(info, tensor.to(dtype), f" as {str(dtype).removeprefix('torch.')}")
    )


def finite(info: TensorInfo, tensor: Tensor, use: str = "") -> Tensor:
    """The tensor, which must have neither NaN nor infinity; `use` completes "holds NaN or infinity in NAME"."""
    if not _is_finite(tensor):
        raise CheckpointError(
            f"{info.shard} holds NaN or infinity in {info.stored}{use}; download the checkpoint again"
        )
    return tensor


def _is_finite(tensor: Tensor) -> bool:
    """Whether a tensor of any dtype has neither NaN nor infinity; only 8-bit floats, which are scales, are copied."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # A NaN propagates to both ends.
    ends = torch.stack(torch.aminmax(tensor.float() if tensor.itemsize == 1 else tensor))
    return bool(ends.isfinite().all())
