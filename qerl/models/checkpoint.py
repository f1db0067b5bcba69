"""Checkpoint folders in the hub's layout, checked by their headers alone: no torch, milliseconds at any size."""

from __future__ import annotations

import json
import math
import struct
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl.config import GROUP_SIZE

#: Values of `model_type` in config.json that are supported.
ARCHITECTURES = ("llama", "qwen2", "qwen3")
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: What PEFT calls the files of an adapter.
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

_COMPRESSED_FORMATS = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}
_QUANTIZE_AGAIN = "quantize the dense checkpoint with `qerl quantize` instead"


class CheckpointError(ValueError):
    """A checkpoint that can't be loaded; the message is one sentence for the user."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies, its safetensors dtype ("BF16", "U8", ...), shape, and size in bytes."""

    shard: Path
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


def check_checkpoint(folder: Path) -> None:
    """Raise `CheckpointError` unless the configuration is supported and every file is there with its full length."""
    weights_format_of(folder)
    read_headers(folder)


def check_base(folder: Path) -> None:
    """Whether `folder` can be a run's base: a whole dense checkpoint, with a tokenizer that has a chat template."""
    check_checkpoint(folder)
    if (found := weights_format_of(folder)) != "bf16":
        raise CheckpointError(f"{folder} is quantized already ({found}); give the dense checkpoint")
    check_tokenizer(folder)


def check_adapter(folder: Path) -> None:
    """Raise `CheckpointError` unless the files of a trained adapter are whole."""
    try:
        _read_json(folder / ADAPTER_CONFIG)
        _read_header(folder / ADAPTER)
    except CheckpointError as error:
        reason = str(error).rpartition(";")[0]
        raise CheckpointError(f"{reason}; delete {folder} and train the run again") from None


def check_tokenizer(folder: Path) -> None:
    """Raise `CheckpointError` unless there is a tokenizer with a chat template."""
    tokenizer = folder / "tokenizer_config.json"
    if not tokenizer.is_file() or not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"{folder} has no tokenizer: tokenizer.json and tokenizer_config.json are needed")
    if not (folder / "chat_template.jinja").is_file() and "chat_template" not in json.loads(tokenizer.read_text()):
        raise CheckpointError(f"{folder} has no chat template; use a chat checkpoint, or add chat_template.jinja to it")


def weights_format_of(folder: Path) -> str:
    """The format of a checkpoint's linear weights: "nvfp4", "mxfp4", "nf4", or "bf16" for dense ones (any float type).

    Raises `CheckpointError` for another architecture or quantization scheme.
    """
    config = read_config(folder)
    quantization = config.get("quantization_config")
    if quantization is None:
        return "bf16"
    method = quantization.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_format(folder, quantization)
    if method == "bitsandbytes":
        return _bitsandbytes_format(folder, quantization)
    raise CheckpointError(f"{folder / CONFIG} has quant_method={method!r}, which isn't supported; {_QUANTIZE_AGAIN}")


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json; `CheckpointError` if it's missing, broken, or of another architecture."""
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint folder {folder} doesn't exist; give a folder in the hub's layout")
    config = _read_json(folder / CONFIG)
    if config.get("model_type") not in ARCHITECTURES:
        raise CheckpointError(
            f"{folder / CONFIG} has model_type={config.get('model_type')!r}, which isn't supported; "
            f"use a model of {', '.join(ARCHITECTURES)}"
        )
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} doesn't exist; download the checkpoint again") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download the checkpoint again") from None


def _compressed_format(folder: Path, quantization: dict[str, Any]) -> str:
    """Weight-only NVFP4 or MXFP4 of compressed-tensors, all layers alike."""
    weights_format = _COMPRESSED_FORMATS.get(str(quantization.get("format")))
    groups = list((quantization.get("config_groups") or {}).values())
    if weights_format is None or len(groups) != 1:
        raise CheckpointError(
            f"{folder / CONFIG} has compressed-tensors format {quantization.get('format')!r} in {len(groups)} groups, "
            f"only one group of {' or '.join(_COMPRESSED_FORMATS)} is supported; {_QUANTIZE_AGAIN}"
        )
    unsupported = {
        "input_activations": groups[0].get("input_activations"),
        "output_activations": groups[0].get("output_activations"),
        "kv_cache_scheme": quantization.get("kv_cache_scheme"),
        "transform_config": quantization.get("transform_config"),
        "sparsity_config": quantization.get("sparsity_config"),
    }
    for key, value in unsupported.items():
        if value:
            raise CheckpointError(f"{folder / CONFIG} has {key}, only weights may be quantized; {_QUANTIZE_AGAIN}")
    weights = groups[0].get("weights") or {}
    _require(folder, weights, {"num_bits": 4, "type": "float", "group_size": GROUP_SIZE[weights_format]})
    return weights_format


def _bitsandbytes_format(folder: Path, quantization: dict[str, Any]) -> str:
    required = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "uint8"}
    _require(folder, quantization, required)
    return "nf4"


def _require(folder: Path, section: dict[str, Any], required: dict[str, Any]) -> None:
    for key, value in required.items():
        if section.get(key) != value:
            raise CheckpointError(
                f"{folder / CONFIG} has {key}={section.get(key)!r} in its quantization_config, only {value!r} is "
                f"supported; {_QUANTIZE_AGAIN}"
            )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sorted; `CheckpointError` if there are none."""
    if (folder / INDEX).exists():
        return [folder / name for name in sorted(set(_read_index(folder).values()))]
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}; download the checkpoint in safetensors format")


def _read_index(folder: Path) -> dict[str, str]:
    index = _read_json(folder / INDEX)
    if not isinstance(index.get("weight_map"), dict):
        raise CheckpointError(f"{folder / INDEX} has no weight_map; download the checkpoint again")
    return index["weight_map"]


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint by name.

    Raises `CheckpointError` if a file is missing, truncated or broken, or if the index and the files disagree.
    """
    tensors: dict[str, TensorInfo] = {}
    for path in weight_files(folder):
        for name, info in _read_header(path).items():
            if name in tensors:
                raise CheckpointError(f"{path} and {tensors[name].shard} both hold {name}; remove the superfluous file")
            tensors[name] = info
    if (folder / INDEX).exists():
        for name, shard in _read_index(folder).items():
            if name not in tensors or tensors[name].shard.name != shard:
                raise CheckpointError(
                    f"{folder / INDEX} names {name}, which {shard} doesn't hold; download the checkpoint again"
                )
    return tensors


def by_shard(headers: dict[str, TensorInfo]) -> dict[Path, list[str]]:
    """The names of the tensors in each file, in the files' order."""
    names: dict[Path, list[str]] = defaultdict(list)
    for name, info in headers.items():
        names[info.shard].append(name)
    return dict(sorted(names.items()))


def _read_header(path: Path) -> dict[str, TensorInfo]:
    """The header of one safetensors file: 8 bytes of length (little endian), JSON, then the tensors' bytes."""
    if not path.exists():
        raise CheckpointError(f"{path} doesn't exist, though the index names it; download the checkpoint again")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else math.inf
        if 8 + length > size:
            raise CheckpointError(f"{path} is truncated within its header; download it again")
        text = file.read(int(length))
    try:
        header: dict[str, Any] = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise CheckpointError(f"{path} is not a safetensors file; download it again") from None
    header.pop("__metadata__", None)
    expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != expected:
        raise CheckpointError(f"{path} has {size} bytes, but its header promises {expected}; download it again")
    return {
        name: TensorInfo(
            path, entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0]
        )
        for name, entry in header.items()
    }
