"""Writing of a dense checkpoint in 4 bits, shard by shard, so that memory never has the whole model.

llmcompressor packs NVFP4 and MXFP4, and bitsandbytes packs NF4. This module decides which tensors they get together.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl.checkpoints.folder import CONFIG, INDEX, WEIGHTS, CheckpointError, by_shard, read_config, read_headers
from qerl.checkpoints.layouts import TensorInfo, names_in_files
from qerl.checkpoints.tensors import finite, stream, write_tensors
from qerl.formats.codecs import check_magnitudes
from qerl.formats.group_size import GROUP_SIZE
from qerl.host.progress import track

#: Weight-only schemes of llmcompressor.
SCHEMES = {"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16"}
#: The dtype to which weights are rounded before packing, and of the tensors that stay unpacked.
DENSE = torch.bfloat16

#: The part of a layer's name that says of which expert it is.
_EXPERT = re.compile(r"(?<=\.)(?:experts\.\d+|shared_expert)\.")
#: vLLM runs these layers of a delta net as one, so they share a scale. llmcompressor knows no such pair, and so gets
#: them by the names of one that it knows.
_PAIR = {".linear_attn.in_proj_qkv.": ".linear_attn.w1.", ".linear_attn.in_proj_z.": ".linear_attn.w3."}
_GENERATION = "generation_config.json"
#: The keys of a source's config.json that `write_config` decides anew.
_REPLACED = ("torch_dtype", "quantization_config")


def linear_layers(source: Path, pack_delta_nets: bool = False) -> set[str]:
    """Names of the linear layers of the blocks (all that the formats quantize) of the checkpoint `source`.

    Those of delta nets are among them where they are to be packed. Raises `CheckpointError` if there are none then.
    """
    from qerl.policy.loading import checkpoint_structure

    structure = checkpoint_structure(source)
    if pack_delta_nets and not structure.layers_of_delta_nets():
        raise CheckpointError(
            f"{source} has no delta nets, which pack_delta_nets would pack; leave pack_delta_nets out"
        )
    return structure.packed_layers(pack_delta_nets)


def write_packed(source: Path, target: Path, weights_format: str, pack_delta_nets: bool = False) -> None:
    """Write the dense checkpoint `source` into the new folder `target` with the linear layers of its blocks packed.

    Those of delta nets are packed where `pack_delta_nets` says so.
    Memory holds one file of `target` and the dense weights that share a scale. A GPU packs, if there is one. The
    tokenizer is not written.
    """
    headers = read_headers(source)
    layers = {f"{layer}.weight" for layer in linear_layers(source, pack_delta_nets)}
    others = _other_matrices(source, headers, layers)
    packer = _NF4(others) if weights_format == "nf4" else _FP4(weights_format, others)
    partners = {name: packer.partners(name) & layers for name in layers}
    led = set().union(*partners.values())
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def tensors_of(name: str) -> dict[str, Tensor]:
        if name in led:
            return {}
        group = {member: headers[member] for member in (name, *sorted(partners.get(name, ())))}
        dense = {
            member: finite(headers[member], tensor.to(DENSE, copy=True), " as bfloat16")
            for member, tensor in stream(group, device)
        }
        if name not in layers:
            return dense
        for member, weight in dense.items():
            check_magnitudes(weight, member)
        return packer.pack(dense)

    write_shards(headers, target, tensors_of)
    write_config(source, target, packer.describe())


def _other_matrices(source: Path, headers: dict[str, TensorInfo], layers: set[str]) -> list[str]:
    """The modules of matrices that stay dense and that the library would take for linear layers: head and routers."""
    from qerl.policy.loading import checkpoint_structure

    blocks = {name.partition(".layers.")[0] for name in layers}
    matrices = (name for name, info in headers.items() if name not in layers and len(info.shape) == 2)
    routers = [name for name in matrices if ".layers." in name and name.partition(".layers.")[0] in blocks]
    return [checkpoint_structure(source).head, *(name.removesuffix(".weight") for name in routers)]


def write_shards(headers: dict[str, TensorInfo], target: Path, tensors_of: Callable[[str], dict[str, Tensor]]) -> None:
    """Write into the new folder `target` what `tensors_of` makes of each tensor's name, in as many files as before.

    The files have the names of those of `headers`, so that stock classes read them.
    """
    target.mkdir(parents=True)
    shards, named = by_shard(headers), names_in_files(headers)
    weight_map: dict[str, str] = {}
    size = 0
    for path, names in track(shards.items(), len(shards), "shards"):
        tensors = {named(key): tensor.cpu() for name in names for key, tensor in tensors_of(name).items()}
        if not tensors:
            continue
        write_tensors(tensors, target / path.name)
        weight_map |= dict.fromkeys(tensors, path.name)
        size += sum(tensor.nbytes for tensor in tensors.values())
        del tensors
        gc.collect()  # llmcompressor's modules refer to each other in cycles and keep the packed tensors
    if set(weight_map.values()) != {WEIGHTS}:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_config(source: Path, target: Path, quantization: dict[str, Any] | None = None) -> None:
    """Copy the model's files besides its weights, with the new dtype and quantization in config.json."""
    config = {key: value for key, value in read_config(source).items() if key not in _REPLACED}
    config |= {"dtype": str(DENSE).removeprefix("torch.")}
    config |= {} if quantization is None else {"quantization_config": quantization}
    (target / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if (source / _GENERATION).exists():
        shutil.copyfile(source / _GENERATION, target / _GENERATION)


def quiet() -> None:
    """Let llmcompressor print errors only, before its import: it warns of a CPU even then, unless its variable says no.

    A level that the user has set stays.
    """
    os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "ERROR")


def _known(name: str) -> str:
    """The name by which llmcompressor knows with which layers a layer shares a scale: without its expert."""
    for name_in_file, known in _PAIR.items():
        name = name.replace(name_in_file, known)
    return _EXPERT.sub("", name)


def _own(expert: re.Match[str] | None, name: str) -> str:
    """The name of a layer, given the one that llmcompressor knows and the expert that it is of."""
    for name_in_file, known in _PAIR.items():
        name = name.replace(known, name_in_file)
    return name if expert is None else name[: expert.start()] + expert.group() + name[expert.start() :]


class _FP4:
    """NVFP4 and MXFP4 by llmcompressor's quantization without a model."""

    def __init__(self, weights_format: str, ignore: list[str]) -> None:
        quiet()
        # The imports take seconds, so only a process that quantizes pays for them.
        from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
        from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter

        scheme = preset_name_to_scheme(SCHEMES[weights_format], ["Linear"])
        self._converter = ModelFreePtqConverter(QuantizationConfig(config_groups={"group_0": scheme}, ignore=ignore))

    def partners(self, name: str) -> set[str]:
        expert = _EXPERT.search(name)
        return {_own(expert, partner) for partner in self._converter.get_dependencies(_known(name))}

    def pack(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        expert = _EXPERT.search(next(iter(weights)))
        packed = self._converter.process({_known(name): weight for name, weight in weights.items()})
        return {_own(expert, name): tensor for name, tensor in packed.items()}

    def describe(self) -> dict[str, Any]:
        described = self._converter.update_config(None).model_dump(mode="json")
        named = {"quant_method": "compressed-tensors", "version": version("compressed-tensors")}
        return {**described, **named, "transform_config": {}}


class _NF4:
    """NF4 with double quantization by bitsandbytes."""

    def __init__(self, ignore: list[str]) -> None:
        # Without a list transformers leaves the head dense by itself.
        self._ignore = ignore if len(ignore) > 1 else None

    def partners(self, name: str) -> set[str]:
        return set()

    def pack(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        from bitsandbytes.functional import quantize_4bit

        [(name, weight)] = weights.items()
        codes, state = quantize_4bit(weight, blocksize=GROUP_SIZE["nf4"], quant_type="nf4", compress_statistics=True)
        return {name: codes, **{f"{name}.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}}

    def describe(self) -> dict[str, Any]:
        from transformers import BitsAndBytesConfig

        scheme = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=DENSE,
            llm_int8_skip_modules=self._ignore,
        )
        return scheme.to_dict()
