"""Checkpoints for other engines: unpacked weights, a base with a separate adapter, or a merge of both."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import safe_open
from torch import Tensor

from qerl.checkpoints.files import (
    ADAPTER,
    ADAPTER_CONFIG,
    INDEX,
    MODELOPT_CONFIG,
    CheckpointError,
    check_adapter,
    index_of,
    read_headers,
    weight_files,
    weights_format_of,
)
from qerl.formats.codecs import dequantize
from qerl.host.provenance import make_folder
from qerl.models.adapter_files import adapter_values, check_plain, read_adapter, write_adapter
from qerl.models.loading import (
    check_tensors,
    config_of,
    converted,
    has_packed_delta_nets,
    load_tokenizer,
    packed_tensors,
    read_layer,
    stream,
    tied_weights,
    write_tensors,
)
from qerl.models.quantize import DENSE, quantize_checkpoint, write_config, write_shards
from qerl.models.structure import empty_model
from qerl.settings.base import ConfigError
from qerl.settings.models import MergedFormat

# Checkpoints for other engines: unpacked weights, or a base with trained norms and a separate LoRA adapter.

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
    _write_unpacked(source, target, dtype, lambda name, weight: weight)
    _copy_but_weights(source, target)
    (target / MODELOPT_CONFIG).unlink(missing_ok=True)
    write_config(source, target, dtype=dtype)


def _write_unpacked(source: Path, target: Path, dtype: torch.dtype, changed: Callable[[str, Tensor], Tensor]) -> None:
    """Write what `changed` makes of each weight of a checkpoint by its name, unpacked, as `dtype`.

    Memory holds one file of `target`, and of `source` one layer.
    """
    check_tensors(source)
    headers, weights_format = read_headers(source), weights_format_of(source)
    packed = packed_tensors(headers, weights_format)

    def tensors_of(name: str) -> dict[str, Tensor]:
        layer = name.rpartition(".weight")[0]
        if layer not in packed:
            [(_, weight)] = stream({name: headers[name]})
            return {name: converted(headers[name], changed(name, weight), dtype)}
        if name != next(iter(packed[layer])):  # a layer's first tensor stands for all of them
            return {}
        weight = dequantize(read_layer(layer, packed[layer], weights_format), torch.float32)
        return {f"{layer}.weight": changed(f"{layer}.weight", weight).to(dtype)}

    write_shards(headers, target, tensors_of)


# vLLM takes no norms with an adapter, so trained norms go into a copy of the checkpoint in float32 beside an adapter of
# LoRA alone. Stock vLLM casts them to its dtype: exact with --dtype float32; bfloat16 rounds a norm near 1 to multiples
# of 0.004 below 1 and 0.008 above, and 4-bit layers can't take up the error.
def export(checkpoint: Path, trained: Path, out: Path) -> None:
    """Split a trained policy into `out`/base and `out`/adapter, which engines without trained norms can load.

    The base is `checkpoint`, dense or packed, with the trained norms in float32; the adapter has only LoRA. An engine
    that computes norms in 16 bits rounds them when it loads them. `trained` is the folder of an adapter in PEFT's
    layout. `out` is written completely or not at all.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists already; remove it or give another folder")
    check_adapter(trained)

    def fill(partial: Path) -> None:
        norms, lora = trained_tensors(trained)
        _write_base(checkpoint, norms, partial / "base")
        named = {"modules_to_save": None, "base_model_name_or_path": str(out.resolve() / "base"), "revision": None}
        config = json.loads((trained / ADAPTER_CONFIG).read_text(encoding="utf-8")) | named
        write_adapter(partial / "adapter", lora, config, checkpoint)

    make_folder(out, fill)


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


def check_changes(checkpoint: Path, changed: Mapping[str, Sequence[int]]) -> None:
    """Raise `CheckpointError` unless the base has each `changed` weight for itself alone, in the shape given there."""
    if shared := sorted(changed.keys() & {*tied_weights(checkpoint)}):
        raise CheckpointError(
            f"the adapter changes {shared[0]}, and {checkpoint} has one weight for embedding and head; "
            "merge this adapter by PEFT"
        )
    shapes = {name: weight.shape for name, weight in empty_model(config_of(checkpoint), DENSE).named_parameters()}
    if unfit := [name for name, shape in sorted(changed.items()) if shapes.get(name) != torch.Size(shape)]:
        has = f"has as {list(shapes[unfit[0]])}" if unfit[0] in shapes else "lacks"
        raise CheckpointError(
            f"the adapter changes {unfit[0]} {list(changed[unfit[0]])}, which {checkpoint} {has}; give it its own base"
        )


def _write_base(checkpoint: Path, norms: dict[str, Tensor], target: Path) -> None:
    check_tensors(checkpoint)
    headers = read_headers(checkpoint)
    packed = packed_tensors(headers, weights_format_of(checkpoint))
    check_changes(checkpoint, {name: norm.shape for name, norm in norms.items()})
    plain = {name for name, info in headers.items() if info.reading == "stored" and info.place is None}
    if others := sorted(norms.keys() - plain | norms.keys() & {f"{layer}.weight" for layer in packed}):
        raise CheckpointError(f"the adapter replaces {others[0]}, which {checkpoint} has packed; export with --merged")
    _copy_but_weights(checkpoint, target)
    if index_of(checkpoint) is not None:
        shutil.copyfile(checkpoint / INDEX, target / INDEX)
    trained = {info.stored: norms[name] for name, info in headers.items() if name in norms}
    for path in weight_files(checkpoint):
        with safe_open(path, framework="pt") as shard:
            tensors = {name: trained.get(name, shard.get_tensor(name)) for name in shard.keys()}  # noqa: SIM118
            write_tensors(tensors, target / path.name, metadata=shard.metadata())


def _copy_but_weights(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", INDEX))


# Merges of a trained policy into one checkpoint: dense, or with its linear layers packed again.
#
# A merged weight is W + (alpha / r) B A, with W unpacked, in float32 and then rounded once. A trained norm replaces
# the base's norm. Noise (AQN) is no part of a stored policy, and so of no merge.


def merge(checkpoint: Path, trained: Path, target: Path, weights: MergedFormat) -> None:
    """Write `checkpoint` with the adapter `trained` merged into it to the new folder `target`, with the tokenizer.

    All tensors are bfloat16, trained norms too; with `nvfp4` the linear layers of the blocks are then rounded to
    nearest, as `quantize_checkpoint` does. Delta nets are packed if they are packed in `checkpoint`. Raises
    `CheckpointError` if the adapter belongs to another base, or has more than plain LoRA.
    """
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        dense = target if weights == "bf16" else Path(scratch) / "dense"
        write_merged(checkpoint, trained, dense)
        load_tokenizer(checkpoint).save_pretrained(dense)
        if weights != "bf16":
            quantize_checkpoint(dense, target, weights, pack_delta_nets=has_packed_delta_nets(checkpoint))


def write_merged(checkpoint: Path, trained: Path, target: Path, dtype: torch.dtype = DENSE) -> None:
    """Write the merged weights as `dtype` into the new folder `target`, without the tokenizer."""
    check_adapter(trained)
    headers = read_headers(checkpoint)
    if any(info.place is not None and info.rows is None for info in headers.values()):
        raise CheckpointError(
            f"{checkpoint} stacks experts in MXFP4, and no merged checkpoint of such experts is supported; export base "
            "and adapter apart, without --merged"
        )
    config = adapter_values(trained)
    check_plain(trained, config, "only plain LoRA is merged here; merge this adapter by PEFT")
    scale, (norms, lora) = config["lora_alpha"] / config["r"], trained_tensors(trained)
    products = dict(_pair(name, lora, config["r"], trained) for name in lora)
    check_changes(
        checkpoint,
        {name: norm.shape for name, norm in norms.items()}
        | {name: (len(lora_B), lora_A.shape[1]) for name, (lora_A, lora_B) in products.items()},
    )

    # The adapter is added to unpacked weights in float32 and rounded once; trained norms are rounded, too, since
    # engines would do so on loading. Each merge states its KL and accuracy against the policy.
    def merged(name: str, weight: Tensor) -> Tensor:
        """A weight of the base as the policy has it."""
        if name not in products:
            return norms.get(name, weight)
        lora_A, lora_B = (side.float() for side in products[name])
        return weight.float() + scale * (lora_B @ lora_A)

    _write_unpacked(checkpoint, target, dtype, merged)
    write_config(checkpoint, target, dtype=dtype)


def _pair(name: str, lora: dict[str, Tensor], rank: int, folder: Path) -> tuple[str, tuple[Tensor, Tensor]]:
    """The weight that a matrix of an adapter's file changes, with A and B. Raises `CheckpointError` unless both fit."""
    layer = name.rpartition(".lora_")[0]
    down, up = (lora.get(f"{layer}.lora_{side}.weight") for side in "AB")
    if down is None or up is None or not len(down) == up.shape[1] == rank:
        raise CheckpointError(
            f"{folder / ADAPTER} has no A and B of rank {rank} for {layer}, as {ADAPTER_CONFIG} states; save it again"
        )
    return f"{layer}.weight", (down, up)
