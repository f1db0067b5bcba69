"""Merges of a trained policy into one checkpoint: dense, or with its linear layers packed again.

A merged weight is W + (alpha / r) B A, with W unpacked, in float32 and then rounded once. A trained norm replaces that
of the base. Noise (AQN) is no part of a stored policy, and so of no merge.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from qerl.checkpoints.folder import (
    ADAPTER_CONFIG,
    CheckpointError,
    check_adapter,
    read_headers,
    weights_format_of,
)
from qerl.checkpoints.tensors import converted, stream
from qerl.formats.codecs import dequantize
from qerl.policy.adapter_files import adapter_values
from qerl.policy.export import check_changes, trained_tensors
from qerl.policy.loading import has_packed_delta_nets, load_tokenizer, packed_tensors, read_layer
from qerl.quantization.checkpoint import quantize_checkpoint
from qerl.quantization.writer import DENSE, write_config, write_shards
from qerl.settings.models import MergedFormat


def merge(checkpoint: Path, trained: Path, target: Path, weights: MergedFormat) -> None:
    """Write `checkpoint` with the adapter `trained` merged into it to the new folder `target`, with the tokenizer.

    All tensors are bfloat16, trained norms too; with `nvfp4` the linear layers of the blocks are then rounded to
    nearest, as `quantize_checkpoint` does. Delta nets are packed if those of `checkpoint` are. Raises
    `CheckpointError` if the adapter belongs to another base, or has more than plain LoRA.
    """
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        dense = target if weights == "bf16" else Path(scratch) / "dense"
        write_merged(checkpoint, trained, dense)
        load_tokenizer(checkpoint).save_pretrained(dense)
        if weights != "bf16":
            quantize_checkpoint(dense, target, weights, pack_delta_nets=has_packed_delta_nets(checkpoint))


def write_merged(checkpoint: Path, trained: Path, target: Path, dtype: torch.dtype = DENSE) -> None:
    """Write the merged weights as `dtype` into the new folder `target`, without the tokenizer.

    Memory holds one file of `target`, and of the base one layer.
    """
    check_adapter(trained)
    weights_format, headers = weights_format_of(checkpoint), read_headers(checkpoint)
    if any(info.place is not None and info.rows is None for info in headers.values()):
        raise CheckpointError(
            f"{checkpoint} stacks experts in MXFP4, and no merged checkpoint of such experts is supported; export base "
            "and adapter apart, without --merged"
        )
    packed = packed_tensors(headers, weights_format)
    merged = _Adapter(trained)
    check_changes(checkpoint, {*headers, *(f"{layer}.weight" for layer in packed)}, merged.changes)

    def tensors_of(name: str) -> dict[str, Tensor]:
        layer = name.rpartition(".weight")[0]
        if layer not in packed:
            [(_, weight)] = stream({name: headers[name]})
            return {name: converted(headers[name], merged.into(name, weight), dtype)}
        if name != next(iter(packed[layer])):  # a layer's first tensor stands for all of them
            return {}
        weight = dequantize(read_layer(layer, packed[layer], weights_format), torch.float32)
        return {f"{layer}.weight": merged.into(f"{layer}.weight", weight).to(dtype)}

    write_shards(headers, target, tensors_of)
    write_config(checkpoint, target)


#: What PEFT's options must be for (alpha / r) B A to be all that an adapter adds.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_rslora": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "alora_invocation_tokens": (None,),
    "layer_replication": (None,),
    "init_lora_weights": (True, False, "gaussian"),  # others change the base's weights
}


class _Adapter:
    """The trained tensors of an adapter's folder; `changes` has the names of the weights that they change."""

    def __init__(self, trained: Path) -> None:
        config = adapter_values(trained)
        for option, plain in _PLAIN.items():
            if config.get(option) is not None and config[option] not in plain:
                raise CheckpointError(
                    f"{trained / ADAPTER_CONFIG} has {option}={config[option]!r}, and only plain LoRA is merged here; "
                    "merge this adapter by PEFT"
                )
        self._scale = config["lora_alpha"] / config["r"]
        self._norms, self._lora = trained_tensors(trained)
        self.changes = {*self._norms, *(f"{name.rpartition('.lora_')[0]}.weight" for name in self._lora)}

    def into(self, name: str, weight: Tensor) -> Tensor:
        """A weight of the base as the policy has it."""
        if name in self._norms or name not in self.changes:
            return self._norms.get(name, weight)
        lora_A, lora_B = (self._lora[f"{name.removesuffix('.weight')}.lora_{side}.weight"].float() for side in "AB")
        return weight.float() + self._scale * (lora_B @ lora_A)
