"""Checkpoints for other engines: unpacked weights, or a base with trained norms and a separate LoRA adapter."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import safe_open
from torch import Tensor

from qerl.checkpoints.folder import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    INDEX,
    MODELOPT_CONFIG,
    WEIGHTS,
    CheckpointError,
    check_adapter,
    index_of,
    read_config,
    read_headers,
    weight_files,
    weights_format_of,
)
from qerl.checkpoints.layouts import names_in_files
from qerl.checkpoints.tensors import converted, stream, write_tensors
from qerl.formats.codecs import dequantize
from qerl.policy.adapter_files import read_adapter, write_adapter
from qerl.policy.loading import packed_layers, read_packed, tied_weights
from qerl.provenance.files import put, writing
from qerl.settings.base import ConfigError

#: Names of what an adapter may have here: LoRA of linear layers and of stacks of experts, and weights and biases in
#: place of the base's.
_KNOWN = re.compile(r"(?!.*(?<!\.experts)\.(base_layer|modules_to_save)\.).*\.(lora_[AB]\.\w+|weight|bias)")
#: The values of vLLM's `max_lora_rank`; an adapter needs the least that isn't below its rank.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def lora_room(rank: int) -> int:
    """The `max_lora_rank` that vLLM needs for an adapter."""
    room = next((size for size in _RANKS if size >= rank), None)
    if room is None:
        raise ConfigError(f"adapter.rank={rank} is above {_RANKS[-1]}, vLLM's highest rank; lower it")
    return room


def write_dense(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Write a packed checkpoint to the folder `target`, with all weights unpacked to `dtype`."""
    weights_format = weights_format_of(source)
    headers = read_headers(source)
    layers = set(packed_layers(headers, weights_format))
    kept = {name: info for name, info in headers.items() if name.rpartition(".weight")[0] not in layers}
    tensors = {name: converted(kept[name], tensor, dtype) for name, tensor in stream(kept)}
    for layer, packed in read_packed(headers, weights_format):
        tensors[f"{layer}.weight"] = dequantize(packed, dtype)
    _copy_but_weights(source, target)
    config = {key: value for key, value in read_config(source).items() if key != "quantization_config"}
    (target / MODELOPT_CONFIG).unlink(missing_ok=True)
    (target / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
    named = names_in_files(headers)
    write_tensors({named(name): tensor for name, tensor in tensors.items()}, target / WEIGHTS)


def export(checkpoint: Path, trained: Path, out: Path) -> None:
    """Split a trained policy into `out`/base and `out`/adapter, which engines without trained norms can load.

    The base is `checkpoint`, dense or packed, with the trained norms in float32; the adapter has only LoRA. An engine
    that computes norms in 16 bits rounds them when it loads them. `trained` is the folder of an adapter in PEFT's
    layout. `out` is written completely or not at all.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists already; remove it or give another folder")
    check_adapter(trained)
    out.parent.mkdir(parents=True, exist_ok=True)
    with writing(out.parent), TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        partial = Path(scratch) / out.name
        norms, lora = trained_tensors(trained)
        _write_base(checkpoint, norms, partial / "base")
        named = {"modules_to_save": None, "base_model_name_or_path": str(out.resolve() / "base"), "revision": None}
        config = json.loads((trained / ADAPTER_CONFIG).read_text(encoding="utf-8")) | named
        write_adapter(partial / "adapter", lora, config, checkpoint)
        put(partial, out)


def trained_tensors(trained: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The trained norms, and the LoRA matrices, of an adapter in PEFT's layout, by the text model's names.

    Raises `CheckpointError` for an adapter of PEFT's that has more, such as trained tokens or LoRA of an embedding.
    """
    adapter = read_adapter(trained)
    if unknown := sorted(name for name in adapter if not _KNOWN.fullmatch(name)):
        raise CheckpointError(
            f"{trained / ADAPTER} holds {unknown[0]}, and only norms and LoRA of linear layers are exported; merge "
            "this adapter by PEFT"
        )
    norms = {name: tensor for name, tensor in adapter.items() if ".lora_" not in name}
    return norms, {name: tensor for name, tensor in adapter.items() if name not in norms}


def check_changes(checkpoint: Path, weights: set[str], changed: set[str]) -> None:
    """Raise `CheckpointError` unless the base has each changed weight among its `weights`, and for itself alone."""
    if shared := sorted(changed & tied_weights(checkpoint)):
        raise CheckpointError(
            f"the adapter changes {shared[0]}, and {checkpoint} has one weight for embedding and head; "
            "merge this adapter by PEFT"
        )
    if unknown := sorted(changed - weights):
        raise CheckpointError(f"the adapter changes {unknown[0]}, which {checkpoint} lacks; give it its own base")


def _write_base(checkpoint: Path, norms: dict[str, Tensor], target: Path) -> None:
    headers = read_headers(checkpoint)
    check_changes(checkpoint, {*headers}, {*norms})
    _copy_but_weights(checkpoint, target)
    if index_of(checkpoint) is not None:
        shutil.copyfile(checkpoint / INDEX, target / INDEX)
    trained = {info.stored: norms[name] for name, info in headers.items() if name in norms}
    for path in weight_files(checkpoint):
        _rewrite(path, target / path.name, trained.get)


def _copy_but_weights(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", INDEX))


def _rewrite(source: Path, target: Path, change: Callable[[str, Tensor], Tensor]) -> None:
    """Copy a safetensors file, applying `change` to each tensor."""
    with safe_open(source, framework="pt") as shard:
        tensors = {name: change(name, shard.get_tensor(name)) for name in shard.keys()}  # noqa: SIM118
        write_tensors(tensors, target, metadata=shard.metadata())
