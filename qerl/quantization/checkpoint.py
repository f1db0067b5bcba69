"""Quantize dense checkpoints: NVFP4 and MXFP4 by llmcompressor, NF4 by bitsandbytes, as these libraries save them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qerl.checkpoints.folder import CheckpointError, read_headers, weight_files, weights_format_of
from qerl.checkpoints.layouts import TensorInfo
from qerl.checkpoints.tensors import stream
from qerl.formats.codecs import dequantize, tensor_specs
from qerl.formats.errors import FormatError
from qerl.provenance.files import put
from qerl.quantization.random_error import write_random_error
from qerl.quantization.writer import linear_layers, write_packed
from qerl.settings.base import ConfigError
from qerl.settings.models import RandomErrorSettings

if TYPE_CHECKING:
    from qerl.quantization.awq import Calibration

#: rtn: round to nearest, without calibration data.
_METHODS = {"bf16": "none", "nvfp4": "rtn", "mxfp4": "rtn", "nf4": "nf4-double-quant"}
_LIBRARIES = {
    "bf16": (),
    "nvfp4": ("llmcompressor", "compressed-tensors"),
    "mxfp4": ("llmcompressor", "compressed-tensors"),
    "nf4": ("bitsandbytes",),
}


def quantize_checkpoint(
    source: Path,
    target: Path,
    weights_format: str,
    calibration: Calibration | None = None,
    error: RandomErrorSettings | None = None,
    pack_delta_nets: bool = False,
) -> dict[str, Any]:
    """Write `source` (dense) into the new folder `target` with the linear layers of its blocks in `weights_format`.

    Weights are rounded to nearest. With a `calibration` (NVFP4, MXFP4) AWQ first equalises the model. Embeddings, norms
    and the head stay bfloat16, and the tokenizer is copied. Layers of delta nets stay bfloat16 too, unless
    `pack_delta_nets` asks for 4 bits (rounded to nearest alone). `target` appears complete or not at all. "bf16"
    writes nothing, or with an `error` the dense weights with that error. Returns `quantization_report`, for AWQ against
    the equalised model.

    Raises `CheckpointError` if `source` isn't dense, couldn't be loaded or holds NaN or infinity, if `target` exists,
    or if there are no delta nets to pack. Raises `FormatError` if the format's groups don't divide a layer's input
    dimension, and `DataError` without calibration texts.
    """
    if pack_delta_nets and (weights_format == "bf16" or calibration is not None):
        raise ConfigError("pack_delta_nets needs a 4-bit format that is rounded to nearest; leave pack_delta_nets out")
    layers = linear_layers(source, pack_delta_nets)
    headers = _dense_headers(source)
    if weights_format == "bf16" or calibration is not None:  # what packs the files themselves meets it as it reads them
        _refuse_what_is_not_finite(headers)
    if weights_format == "bf16" and error is None:
        return quantization_report(source, source, "bf16")
    _check_layers(source, layers, headers, error.of if error else weights_format)
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} exists already; remove it or give another folder")
    from qerl.policy.loading import check_tensors, load_tokenizer

    check_tensors(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        partial = Path(scratch) / target.name
        if error is not None:
            report = _with_error(source, partial, error)
        elif calibration is not None:
            report = _equalised(source, partial, weights_format, calibration)
        else:
            write_packed(source, partial, weights_format, pack_delta_nets)
            report = quantization_report(source, partial, weights_format, pack_delta_nets)
        load_tokenizer(source).save_pretrained(partial)
        put(partial, target)
    return report


def _check_layers(source: Path, layers: set[str], headers: dict[str, TensorInfo], weights_format: str) -> None:
    """Raise an error for a layer that has no weight, or whose weight the format can't have."""
    for layer in layers:
        if f"{layer}.weight" not in headers:
            raise CheckpointError(f"{source} lacks {layer}.weight, which its config.json calls for; download it again")
        rows, columns = headers[f"{layer}.weight"].shape
        try:
            tensor_specs(weights_format, (rows, columns))
        except FormatError as reason:
            raise FormatError(f"{source}: {layer}: {reason}") from None


def _with_error(source: Path, target: Path, error: RandomErrorSettings) -> dict[str, Any]:
    """Write the dense weights with a random error; returns the report."""
    write_random_error(source, target, error)
    described = {"method": "random", "random_error": error.model_dump(mode="json")}
    return quantization_report(source, target, "bf16") | described


def _equalised(source: Path, target: Path, weights_format: str, calibration: Calibration) -> dict[str, Any]:
    """Write the weights packed, after AWQ has equalised the model; returns the report."""
    from qerl.quantization.awq import write_equalised

    with TemporaryDirectory(dir=target.parent) as scratch:
        dense = Path(scratch) / "equalised"
        described = {"method": "awq", "calibration": write_equalised(source, dense, weights_format, calibration)}
        write_packed(dense, target, weights_format)
        return quantization_report(dense, target, weights_format) | described


def quantization_report(
    source: Path, target: Path, weights_format: str, pack_delta_nets: bool = False
) -> dict[str, Any]:
    """Size and error of a quantized checkpoint.

    size_bytes is that of the weight files. bits_per_weight is over the linear layers of the blocks, scales included,
    and bits_per_weight_model over all parameters. relative_error is |W - W_hat| / |W| (Frobenius) by layer type
    ("q_proj").
    """
    dense = _dense_headers(source)
    headers = read_headers(target)
    layers = linear_layers(source, pack_delta_nets)
    weights = sum(math.prod(dense[f"{layer}.weight"].shape) for layer in layers)
    parameters = sum(math.prod(info.shape) for info in dense.values())
    # A bias belongs to the layer, not to its quantized weight.
    stored = sum(info.size_bytes for name, info in headers.items() if name.rpartition(".weight")[0] in layers)
    return {
        "weights_format": weights_format,
        "method": _METHODS[weights_format],
        "pack_delta_nets": pack_delta_nets,
        "size_bytes": sum(path.stat().st_size for path in weight_files(target)),
        "bits_per_weight": 8 * stored / weights,
        "bits_per_weight_model": 8 * sum(info.size_bytes for info in headers.values()) / parameters,
        "relative_error": {} if source == target else _relative_errors(dense, headers, weights_format, layers),
        "versions": {name: version(name) for name in ("torch", "transformers", *_LIBRARIES[weights_format])},
    }


def _refuse_what_is_not_finite(headers: dict[str, TensorInfo]) -> None:
    for _ in stream(headers):
        pass


def _dense_headers(source: Path) -> dict[str, TensorInfo]:
    weights_format = weights_format_of(source)
    if weights_format != "bf16":
        raise CheckpointError(f"{source} is quantized already ({weights_format}); give the dense checkpoint")
    return read_headers(source)


def _relative_errors(
    dense: dict[str, TensorInfo], headers: dict[str, TensorInfo], weights_format: str, layers: set[str]
) -> dict[str, float]:
    error: dict[str, float] = defaultdict(float)
    norm: dict[str, float] = defaultdict(float)
    for layer, stored in _stored_weights(headers, weights_format, layers):
        kind = layer.rpartition(".")[2]
        name = f"{layer}.weight"
        [(_, weight)] = stream({name: dense[name]})
        error[kind] += _squares(stored.sub_(weight))
        norm[kind] += _squares(weight)
    # Weights of zero are packed without an error.
    return {kind: math.sqrt(error[kind] / (norm[kind] or 1.0)) for kind in sorted(error)}


def _stored_weights(
    headers: dict[str, TensorInfo], weights_format: str, layers: set[str]
) -> Iterator[tuple[str, Tensor]]:
    """The weight of each linear layer of the blocks as float32, unpacked where it is packed."""
    from qerl.policy.loading import read_packed

    if weights_format == "bf16":
        for layer in sorted(layers):
            [(_, weight)] = stream({f"{layer}.weight": headers[f"{layer}.weight"]})
            yield layer, weight.float()
        return
    for layer, packed in read_packed(headers, weights_format):
        yield layer, dequantize(packed, torch.float32)


def _squares(values: Tensor) -> float:
    return torch.linalg.vector_norm(values, dtype=torch.float64).item() ** 2
