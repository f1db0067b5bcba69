"""A dense checkpoint with a random static error of the variance that rounding to 4 bits has, group by group.

It is the control of quantization: an error as large in each group of each weight, which knows nothing of the weights.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from qerl.checkpoints.folder import read_headers
from qerl.checkpoints.layouts import TensorInfo
from qerl.checkpoints.tensors import converted, stream
from qerl.formats.codecs import Packed, dequantize
from qerl.formats.group_size import GROUP_SIZE
from qerl.quantization.writer import DENSE, write_config, write_packed, write_shards
from qerl.settings.models import RandomErrorSettings


def write_random_error(source: Path, target: Path, error: RandomErrorSettings) -> None:
    """Write the dense checkpoint `source` with the error into the new folder `target`, without the tokenizer.

    `source` is rounded first, for the variance of each group. The error is drawn from N(0, variance), by the seed and
    the name of the weight.
    """
    from qerl.policy.loading import read_packed

    with TemporaryDirectory(dir=target.parent) as scratch:
        packed = Path(scratch) / "packed"
        write_packed(source, packed, error.of)
        rounded = dict(read_packed(read_headers(packed), error.of))
    headers = read_headers(source)
    write_shards(headers, target, lambda name: {name: _with_error(name, headers[name], rounded, error)})
    write_config(source, target)


def _with_error(name: str, info: TensorInfo, rounded: dict[str, Packed], error: RandomErrorSettings) -> Tensor:
    [(_, weight)] = stream({name: info})
    dense = converted(info, weight, DENSE)
    packed = rounded.get(name.removesuffix(".weight"))
    if packed is None:
        return dense
    normal = _standard_normal(name, error.seed or 0, dense.shape)
    drawn = group_error(dense.float(), dequantize(packed, torch.float32), GROUP_SIZE[error.of], normal)
    return (dense.float() + drawn).to(DENSE)


def group_error(weight: Tensor, rounded: Tensor, group: int, normal: Tensor) -> Tensor:
    """`normal` draws scaled in each group of a row to the mean square of rounding's error; all [out, in]."""
    squares = (rounded - weight).square().unflatten(-1, (-1, group)).mean(-1, keepdim=True)
    return (normal.unflatten(-1, (-1, group)) * squares.sqrt()).flatten(-2)


def _standard_normal(name: str, seed: int, shape: torch.Size) -> Tensor:
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, key], dtype=np.uint64)))
    return torch.from_numpy(generator.standard_normal(tuple(shape), dtype=np.float32))
