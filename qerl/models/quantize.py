"""Quantization of dense checkpoints to 4 bits: rounding to nearest, AWQ, random errors, and the writer."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qerl.checkpoints.files import (
    CONFIG,
    INDEX,
    WEIGHTS,
    CheckpointError,
    by_shard,
    read_config,
    read_headers,
    weight_files,
    weights_format_of,
)
from qerl.checkpoints.layouts import TensorInfo, names_in_files
from qerl.data.prompts import TemplateInput, prompt_ids
from qerl.data.records import DataError
from qerl.data.sources import read_meta, read_split
from qerl.formats.codecs import check_magnitudes, dequantize, tensor_specs
from qerl.host.console import track
from qerl.host.provenance import put
from qerl.models.loading import (
    check_tensors,
    checkpoint_structure,
    converted,
    finite,
    load_model,
    load_tokenizer,
    read_packed,
    stream,
    write_tensors,
)
from qerl.models.structure import Structure
from qerl.settings.base import ConfigError
from qerl.settings.models import FORMATS, CalibrationSettings, FormatError, RandomErrorSettings
from qerl.settings.run import LAYERS

# Writing of a dense checkpoint in 4 bits, shard by shard, so that memory never has the whole model.
#
# llmcompressor packs NVFP4 and MXFP4, and bitsandbytes packs NF4. This module decides which tensors they get together.

#: The dtype to which weights are rounded before packing, and of the tensors that stay unpacked.
DENSE = torch.bfloat16

#: The part of a layer's name that names its expert.
_EXPERT = re.compile(r"(?<=\.)(?:experts\.\d+|shared_expert)\.")
#: vLLM runs these layers of a delta net as one, so they share a scale. llmcompressor knows no such pair, and so gets
#: them by the names of one that it knows.
_PAIR = {".linear_attn.in_proj_qkv.": ".linear_attn.w1.", ".linear_attn.in_proj_z.": ".linear_attn.w3."}
_GENERATION = "generation_config.json"
#: The keys of a source's config.json that `write_config` decides anew.
_REPLACED = ("torch_dtype", "quantization_config")


def linear_layers(source: Path, pack_delta_nets: bool = False) -> frozenset[str]:
    """Names of the linear layers of the blocks (all that the formats quantize) of the checkpoint `source`.

    Those of delta nets are among them where they are to be packed. Raises `CheckpointError` if there are none then.
    """

    structure = checkpoint_structure(source)
    if pack_delta_nets and not structure.packed_nets:
        raise CheckpointError(
            f"{source} has no delta nets, which pack_delta_nets would pack; leave pack_delta_nets out"
        )
    return structure.packed_layers(pack_delta_nets)


# The converter gets only the layers that share a scale, because llmcompressor takes a whole file and holds dense and
# packed weights together. Working memory on a CPU: 30 bytes a weight for NVFP4, 14 for NF4, 9 for MXFP4, so 4 GB for
# the widest layer of a 32B. Garbage is collected after each file: the library's modules are cycles that keep their
# packed tensors.
def write_packed(source: Path, target: Path, weights_format: str, pack_delta_nets: bool = False) -> None:
    """Write the dense checkpoint `source` into the new folder `target` with the linear layers of its blocks packed.

    Those of delta nets are packed where `pack_delta_nets` says so.
    Memory holds one file of `target` and the dense weights that share a scale. A GPU packs, if there is one. The
    tokenizer is not written.
    """
    headers = read_headers(source)
    layers = {f"{layer}.weight" for layer in linear_layers(source, pack_delta_nets)}
    others = _other_matrices(source, headers, layers)
    packer = _CompressedTensors(weights_format, others) if FORMATS[weights_format].scheme else _NF4(others)
    partners = packer.partners(layers)
    members = set().union(*partners.values())
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def tensors_of(name: str) -> dict[str, Tensor]:
        if name in members:
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
    blocks = {name.partition(".layers.")[0] for name in layers}
    matrices = (name for name, info in headers.items() if name not in layers and len(info.shape) == 2)
    routers = [name for name in matrices if ".layers." in name and name.partition(".layers.")[0] in blocks]
    return [checkpoint_structure(source).head, *(name.removesuffix(".weight") for name in routers)]


def write_shards(headers: dict[str, TensorInfo], target: Path, tensors_of: Callable[[str], dict[str, Tensor]]) -> None:
    """Write into the folder `target` what `tensors_of` makes of each tensor's name, in as many files as before.

    The files have the same names as the files of `headers`, so that stock classes read them.
    """
    target.mkdir(parents=True, exist_ok=True)
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


def write_config(
    source: Path, target: Path, quantization: dict[str, Any] | None = None, dtype: torch.dtype = DENSE
) -> None:
    """Copy the model's files besides its weights, with the new dtype and quantization in config.json."""
    config = {key: value for key, value in read_config(source).items() if key not in _REPLACED}
    config |= {"dtype": str(dtype).removeprefix("torch.")}
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


def compressed_config(weights_format: str, ignore: list[str]) -> Any:
    """compressed-tensors' configuration of a checkpoint whose linear layers are packed, but for those to `ignore`."""
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, preset_name_to_scheme

    packed = FORMATS[weights_format]
    scheme = preset_name_to_scheme(packed.scheme, ["Linear"])
    scheme.format = packed.layout
    status = QuantizationStatus.COMPRESSED
    groups = {"group_0": scheme}
    return QuantizationConfig(config_groups=groups, ignore=ignore, format=packed.layout, quantization_status=status)


class _CompressedTensors:
    """A scheme of weights alone by llmcompressor's quantization without a model."""

    def __init__(self, weights_format: str, ignore: list[str]) -> None:
        quiet()
        # The import takes seconds, so only a process that quantizes pays for it.
        from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter

        self._config = compressed_config(weights_format, ignore)
        self._converter = ModelFreePtqConverter(self._config)

    def partners(self, layers: set[str]) -> dict[str, set[str]]:
        """The other layers with which layers share a scale, by the first of them; all are names of weights."""
        found = {}
        named = {("".join(_EXPERT.findall(name)), _known(name)): name for name in layers}
        for (expert, known), name in named.items():
            others = ((expert, other) for other in self._converter.get_dependencies(known))
            found[name] = {named[other] for other in others if other in named}
        return found

    def pack(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        named = {_known(name).removesuffix("weight"): name.removesuffix("weight") for name in weights}
        packed = self._converter.process({_known(name): weight for name, weight in weights.items()})
        parts = ((key.rpartition("."), tensor) for key, tensor in packed.items())
        return {f"{named[f'{layer}.']}{part}": tensor for (layer, _, part), tensor in parts}

    def describe(self) -> dict[str, Any]:
        named = {"version": version("compressed-tensors"), "transform_config": {}}
        return self._config.model_dump(mode="json") | named


class _NF4:
    """NF4 with double quantization by bitsandbytes."""

    def __init__(self, ignore: list[str]) -> None:
        # Without a list transformers leaves the head dense by itself.
        self._ignore = ignore if len(ignore) > 1 else None

    def partners(self, layers: set[str]) -> dict[str, set[str]]:
        return {}

    def pack(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        from bitsandbytes.functional import quantize_4bit

        [(name, weight)] = weights.items()
        codes, state = quantize_4bit(
            weight, blocksize=FORMATS["nf4"].group_size, quant_type="nf4", compress_statistics=True
        )
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


# A dense checkpoint with a random static error of the variance that rounding to 4 bits has, group by group.
#
# It is the control of quantization: an error as large in each group of each weight, which knows nothing of the weights.


# A random error is a checkpoint, not a change at loading, so that training, evaluation and the table of bases read the
# same file.
def write_random_error(source: Path, target: Path, error: RandomErrorSettings) -> None:
    """Write the dense checkpoint `source` with the error into the new folder `target`, without the tokenizer.

    `source` is rounded first, for the mean square of rounding's error in each group. The error is drawn from a normal
    distribution with `error.variance` times this variance, by the seed and the name of the weight.
    """
    with TemporaryDirectory(dir=target.parent) as scratch:
        packed = Path(scratch) / "packed"
        write_packed(source, packed, error.of)
        rounded = dict(read_packed(read_headers(packed), error.of))
    headers = read_headers(source)

    def with_error(name: str) -> dict[str, Tensor]:
        [(_, stored)] = stream({name: headers[name]})
        dense = converted(headers[name], stored, DENSE)
        packed = rounded.get(name.removesuffix(".weight"))
        if packed is None:
            return {name: dense}
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        generator = np.random.Generator(np.random.Philox(key=np.array([error.seed or 0, key], dtype=np.uint64)))
        normal = torch.from_numpy(generator.standard_normal(tuple(dense.shape), dtype=np.float32))
        drawn = group_error(dense.float(), dequantize(packed, torch.float32), FORMATS[error.of].group_size, normal)
        return {name: (dense.float() + math.sqrt(error.variance) * drawn).to(DENSE)}

    write_shards(headers, target, with_error)
    write_config(source, target)


def group_error(weight: Tensor, rounded: Tensor, group: int, normal: Tensor) -> Tensor:
    """`normal` draws scaled in each group of a row to the mean square of rounding's error; all [out, in]."""
    squares = (rounded - weight).square().unflatten(-1, (-1, group)).mean(-1, keepdim=True)
    return (normal.unflatten(-1, (-1, group)) * squares.sqrt()).flatten(-2)


# AWQ (arXiv 2306.00978) by llmcompressor: equalise a dense model so that rounding it to 4 bits costs less.
#
# AWQ finds channels of a layer's input that are large on calibration texts. The layer before (a norm, v_proj, up_proj)
# is divided by a scale for each of them, and the weights that read them are multiplied by it. The model's function
# doesn't change. The result is a dense checkpoint, which is rounded like any other.


@dataclass(frozen=True)
class Calibration:
    """The texts on which AWQ measures activations; `data` is the folder of the prepared data set."""

    settings: CalibrationSettings
    data: Path


def calibration_ids(tokenizer: PreTrainedTokenizerBase, calibration: Calibration) -> list[list[int]]:
    """Token ids of problems of the training split with their solutions, drawn by the seed, each cut to the length."""
    settings, data = calibration.settings, calibration.data
    problems = read_split(data, "train")
    if not problems:
        raise DataError(f"{data} has no training problems to calibrate on; name another set as calibration.dataset")
    about = read_meta(data)
    texts = []
    for problem in Random(settings.seed).sample(problems, min(settings.samples, len(problems))):
        prompt = prompt_ids(tokenizer, problem, about.instruction, TemplateInput.of(about))
        answer = tokenizer.encode(problem.solution or problem.answer, add_special_tokens=False)
        texts.append([*prompt, *answer, tokenizer.eos_token_id][: settings.length])
    return texts


def refused_by_awq(structure: Structure) -> str | None:
    """A sentence that says why AWQ doesn't equalise a model of this structure; None if it does."""
    if set(structure.targets) != set(LAYERS):
        needed, present = ", ".join(LAYERS), ", ".join(structure.targets)
        return f"recipe: awq needs the layers {needed}, and the model has {present}"
    if structure.offset != 0:
        return "recipe: awq divides the weights of norms, and this model's norms don't multiply by their weights alone"
    return None


def check_equalised(source: Path) -> None:
    """Raise `CheckpointError` for a checkpoint of a structure that AWQ doesn't equalise."""
    if refusal := refused_by_awq(checkpoint_structure(source)):
        raise CheckpointError(f"{source}: {refusal}; use recipe: rtn")


# AWQ divides norms by its scales, so the same sigma is a different share of such a norm. It needs the dense model in
# host memory (7B: 15 GB) and room for a dense copy, and runs the texts through each part of a block some twenty times.
# Without a GPU llmcompressor 0.14 fails when it pins memory; a subclass omits that.
def write_equalised(source: Path, target: Path, weights_format: str, calibration: Calibration) -> dict[str, Any]:
    """Write the dense checkpoint `source`, equalised for rounding to `weights_format`, into the new folder `target`.

    The model is in host memory and, block by block, on the GPU, if there is one. Returns what it was calibrated on.
    """
    check_equalised(source)
    tokenizer = load_tokenizer(source)
    texts = calibration_ids(tokenizer, calibration)
    model = load_model(source, DENSE)
    equalise(model, weights_format, texts, tokenizer)
    # One by one, because reading a parameter may move it to the GPU.
    write_shards(read_headers(source), target, lambda name: {name: model.get_parameter(name).detach().clone()})
    write_config(source, target)
    return {
        **calibration.settings.model_dump(),
        "texts": len(texts),
        "tokens": sum(map(len, texts)),
        "sha256": read_meta(calibration.data).sha256["train"],
    }


def equalise(
    model: PreTrainedModel, weights_format: str, texts: list[list[int]], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Scale weights and norms of `model` in place, for rounding its linear layers to `weights_format`."""
    quiet()
    # Imported here, because the imports take seconds and configure a global logger.
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    rounding = QuantizationModifier(targets="Linear", scheme=FORMATS[weights_format].scheme, ignore=["lm_head"])
    processor: Any = tokenizer  # without one the library asks the folder for a processor of images
    rows: Any = [{"input_ids": torch.tensor([text])} for text in texts]
    batches: DataLoader[Any] = DataLoader(rows, batch_size=None)
    oneshot(model=model, recipe=[_modifier(), rounding], dataset=batches, processor=processor)


def _modifier() -> Any:
    """The library's modifier, its activations in host memory: at 256 texts of 2,048 tokens a 7B's take 30 GB."""
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    host = torch.device("cpu")
    if torch.accelerator.is_available():
        return AWQModifier(offload_device=host)

    class Unpinned(IntermediatesCache):
        def pin_memory(self, *_: Any) -> None: ...

    class CPUModifier(AWQModifier):
        """The library's modifier without pinned memory, which torch refuses on a machine without a GPU."""

        def _setup_activation_cache_hooks(self) -> None:
            super()._setup_activation_cache_hooks()
            for module in self._parent_args_cache:
                self._parent_args_cache[module] = Unpinned(None, host)

    return CPUModifier(offload_device=host)


# Quantize dense checkpoints: NVFP4 and MXFP4 by llmcompressor, NF4 by bitsandbytes, as these libraries save them.


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
    if weights_format == "bf16" or calibration is not None:
        # What packs the files themselves meets NaN and infinity as it reads them; here they are read for that alone.
        for _ in stream(headers):
            pass
    if weights_format == "bf16" and error is None:
        return quantization_report(source, source, "bf16")
    for layer in layers:
        if f"{layer}.weight" not in headers:
            raise CheckpointError(f"{source} lacks {layer}.weight, which its config.json calls for; download it again")
        try:
            rows, columns = headers[f"{layer}.weight"].shape
            tensor_specs(error.of if error else weights_format, (rows, columns))
        except FormatError as reason:
            raise FormatError(f"{source}: {layer}: {reason}") from None
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} exists already; remove it or give another folder")
    check_tensors(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        partial = Path(scratch) / target.name
        if error is not None:
            write_random_error(source, partial, error)
            report = quantization_report(source, partial, "bf16")
            report |= {"method": "random", "random_error": error.model_dump(mode="json")}
        elif calibration is not None:
            dense = partial.with_name(f"{target.name}-equalised")
            stated = {"method": "awq", "calibration": write_equalised(source, dense, weights_format, calibration)}
            write_packed(dense, partial, weights_format)
            report = quantization_report(dense, partial, weights_format) | stated
        else:
            write_packed(source, partial, weights_format, pack_delta_nets)
            report = quantization_report(source, partial, weights_format, pack_delta_nets)
        load_tokenizer(source).save_pretrained(partial)
        put(partial, target)
    return report


def quantization_report(
    source: Path, target: Path, weights_format: str, pack_delta_nets: bool = False
) -> dict[str, Any]:
    """Size and error of a quantized checkpoint.

    size_bytes counts the weight files. bits_per_weight is over the linear layers of the blocks, scales included,
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
    packed = FORMATS.get(weights_format)
    return {
        "weights_format": weights_format,
        "method": packed.method if packed else "none",
        "pack_delta_nets": pack_delta_nets,
        "size_bytes": sum(path.stat().st_size for path in weight_files(target)),
        "bits_per_weight": 8 * stored / weights,
        "bits_per_weight_model": 8 * sum(info.size_bytes for info in headers.values()) / parameters,
        "relative_error": {} if source == target else _relative_errors(dense, headers, weights_format, layers),
        "versions": {name: version(name) for name in ("torch", "transformers", *(packed.libraries if packed else ()))},
    }


def _dense_headers(source: Path) -> dict[str, TensorInfo]:
    weights_format = weights_format_of(source)
    if weights_format != "bf16":
        raise CheckpointError(f"{source} is quantized already ({weights_format}); give the dense checkpoint")
    return read_headers(source)


def _relative_errors(
    dense: dict[str, TensorInfo], headers: dict[str, TensorInfo], weights_format: str, layers: frozenset[str]
) -> dict[str, float]:
    def weight_of(layer: str, infos: dict[str, TensorInfo]) -> Tensor:
        [(_, weight)] = stream({f"{layer}.weight": infos[f"{layer}.weight"]})
        return weight

    def squares(values: Tensor) -> float:
        return torch.linalg.vector_norm(values, dtype=torch.float64).item() ** 2

    stored: Iterable[tuple[str, Tensor]] = ((layer, weight_of(layer, headers).float()) for layer in sorted(layers))
    if weights_format != "bf16":
        packed = read_packed(headers, weights_format)
        stored = ((layer, dequantize(weight, torch.float32)) for layer, weight in packed)
    error: dict[str, float] = defaultdict(float)
    norm: dict[str, float] = defaultdict(float)
    for layer, rounded in stored:
        kind, weight = layer.rpartition(".")[2], weight_of(layer, dense)
        error[kind] += squares(rounded.sub_(weight))
        norm[kind] += squares(weight)
    # Weights of zero are packed without an error.
    return {kind: math.sqrt(error[kind] / (norm[kind] or 1.0)) for kind in sorted(error)}
