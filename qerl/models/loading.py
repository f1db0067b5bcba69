"""Tensors of checkpoints, one at a time, and dense and packed checkpoints as models with layers of `PackedLinear`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers import __version__ as transformers_version

from qerl.checkpoints.files import (
    CONFIG,
    CheckpointError,
    by_shard,
    check_files,
    check_layers,
    differences,
    read_config,
    read_headers,
    weights_format_of,
    whole_model,
)
from qerl.checkpoints.layouts import FP8_BLOCK, TensorInfo, scale_grid
from qerl.formats.codecs import CODECS, Packed, check_scales, dequantize, from_checkpoint, read_nf4_state
from qerl.host.console import log
from qerl.host.provenance import share
from qerl.models.blocks import use_attend
from qerl.models.experts import Experts, Float32Router
from qerl.models.linear import PackedLinear
from qerl.models.structure import MISFITS, Structure, StructureError, empty_model, structure_of
from qerl.settings.base import ConfigError
from qerl.settings.models import FormatError

# Tensors of checkpoint files, read one at a time.


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


# Checkpoints as Hugging Face models.

_GENERATION = "generation_config.json"
#: The dtypes of packed weights' tensors, by their names in headers.
_PACKED_DTYPES = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}
#: The module and name of the parameter or buffer that a tensor of the checkpoint fills.
_Slot = tuple[nn.Module, str]


def config_of(folder: Path) -> PreTrainedConfig:
    """The configuration of a checkpoint's text model. Raises `CheckpointError` if transformers doesn't know it."""
    values = read_config(folder)
    if values["model_type"] not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{folder / CONFIG} has model_type={values['model_type']!r}, which transformers {transformers_version} "
            "doesn't know, and code of a checkpoint isn't run; install a version that knows it, or take another model"
        )
    try:
        if whole_model(folder) is None:  # else this would be the configuration of the whole
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)
        config: PreTrainedConfig = AutoConfig.for_model(**values)
    except MISFITS as error:
        raise CheckpointError(f"{folder / CONFIG} has model_type={values['model_type']!r}: {error}") from None
    config.name_or_path = str(folder)
    return config


def checkpoint_structure(folder: Path) -> Structure:
    """The structure of a checkpoint's model. Raises `CheckpointError` if this project doesn't handle it."""
    try:
        return structure_of(config_of(folder))
    except StructureError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def check_attention_dropout(folder: Path) -> None:
    """Raise `ConfigError` for a checkpoint with dropout in attention, which counts in updates alone."""
    if dropout := checkpoint_structure(folder).attention_dropout:
        raise ConfigError(
            f"{folder / CONFIG} states dropout of {dropout} in attention, which updates don't support; set "
            "attention_dropout to 0 there"
        )


def load_model(
    folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu", float32_norms: bool = False
) -> PreTrainedModel:
    """Load a checkpoint of a decoder: dense, NVFP4, MXFP4 or NF4, as published (docs/checkpoints.md).

    Dense tensors become `dtype`, packed ones stay as stored; the model is in evaluation mode. Its blocks call
    `qerl.models.blocks`, because transformers' default has no soft caps. With `float32_norms`, the
    norms that can have noise keep float32 weights; the caller replaces them by modules that compute with such weights.
    Routers of experts are float32 always.
    Tensors are read one at a time, so the memory peak is the model's size; with a GPU as `device`, host memory has at
    most one file. Raises `CheckpointError`, which names the file and the fix.
    """
    folder = Path(folder)
    norms, headers = checkpoint_structure(folder).noisy_norms(), read_headers(folder)
    for difference in differences(folder, headers):
        log.info("%s", difference)
    model, slots = _empty_slots(folder, headers, dtype)
    routers = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Float32Router))
    for name, tensor in stream(headers, device):
        wide = name.startswith(routers) or (float32_norms and name.rpartition(".")[0] in norms)
        _fill(slots[name], name, tensor, torch.float32 if wide else dtype, headers[name])
    for layer, module in model.named_modules():
        if isinstance(module, PackedLinear):
            try:
                check_scales(module.packed)
            except FormatError as error:
                shard = headers[f"{layer}.{CODECS[module.weights_format].marker}"].shard
                raise CheckpointError(f"{shard}: {layer}: {error}") from None
    if tied := tied_weights(folder):
        if tied[0] in headers:
            _check_tied([model.get_parameter(name) for name in tied], headers[tied[0]])
        model.tie_weights()
    _restore_computed_buffers(model, device)
    if (folder / _GENERATION).exists():
        model.generation_config = _generation_config(folder)
    use_attend(model)
    return model.eval()


def _generation_config(folder: Path) -> GenerationConfig:
    try:
        config = GenerationConfig.from_pretrained(folder)
    except (OSError, *MISFITS) as error:
        raise CheckpointError(f"{folder / _GENERATION} can't be read ({error}); download it again") from None
    stops = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if unknown := [stop for stop in stops if stop is not None and type(stop) is not int]:
        raise CheckpointError(
            f"{folder / _GENERATION} has eos_token_id={unknown[0]!r}, which is no number of a token; correct it"
        )
    return config


def check_tensors(folder: Path) -> None:
    """Raise the `CheckpointError` with which a checkpoint would fail to load, before any work is done with it.

    Names and shapes are compared with config.json's, and dtypes of packed tensors with their format's. Only a head that
    config.json ties has its values read.
    """
    headers = read_headers(folder)
    _, slots = _empty_slots(folder, headers, torch.bfloat16)
    for name, info in headers.items():
        module, own_name = slots[name]
        if name.endswith(CODECS["nf4"].marker):
            continue
        target, dtype = getattr(module, own_name), _PACKED_DTYPES.get(info.dtype)
        if info.shape != target.shape or (_is_packed(module, own_name) and dtype != target.dtype):
            raise _mismatch(name, info, target)
    tied = tied_weights(folder)
    if tied and tied[0] in headers:
        weights = dict(stream({name: headers[name] for name in tied}))
        _check_tied([weights[name] for name in tied], headers[tied[0]])


def tied_weights(folder: Path) -> tuple[str, ...]:
    """The names of the head's and the embedding's weights, if config.json ties them; else none."""
    structure = checkpoint_structure(folder)
    ends = f"{structure.head}.weight", f"{structure.embedding}.weight"
    return ends if config_of(folder).tie_word_embeddings else ()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint.

    Raises CheckpointError if it needs code from the checkpoint.
    """
    check_files(folder)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:
        raise CheckpointError(f"{folder} has a tokenizer that can't be loaded: {error}") from None
    return tokenizer


def read_packed(headers: dict[str, TensorInfo], weights_format: str) -> Iterator[tuple[str, Packed]]:
    """Yield (layer name, packed weight) of a packed checkpoint."""
    for layer, infos in packed_tensors(headers, weights_format).items():
        yield layer, read_layer(layer, infos, weights_format)


def packed_tensors(headers: dict[str, TensorInfo], weights_format: str) -> dict[str, dict[str, TensorInfo]]:
    """The tensors of each layer with packed weights, by the layer's name and their own; none of a dense checkpoint."""
    if weights_format == "bf16":
        return {}
    marker = f".{CODECS[weights_format].marker}"
    layers: dict[str, dict[str, TensorInfo]] = {
        name.removesuffix(marker): {} for name in headers if name.endswith(marker)
    }
    for name, info in headers.items():
        layer, separator, _ = name.rpartition(".weight")
        if separator and layer in layers:
            layers[layer][name] = info
    return layers


def read_layer(layer: str, infos: dict[str, TensorInfo], weights_format: str) -> Packed:
    """The packed weight of a layer out of the tensors that `packed_tensors` names."""
    tensors = {name.removeprefix(layer + "."): tensor for name, tensor in stream(infos)}
    try:
        return from_checkpoint(weights_format, tensors)
    except FormatError as error:
        raise CheckpointError(f"{next(iter(infos.values())).shard}: {layer}: {error}") from None


def has_packed_delta_nets(folder: Path) -> bool:
    """Whether a checkpoint has packed weights of delta nets; not if its folder has no weights."""
    nets = checkpoint_structure(folder).packed_nets
    if not nets or not any(folder.glob("*.safetensors")):
        return False
    return not nets.isdisjoint(packed_tensors(read_headers(folder), weights_format_of(folder)))


def _insert_packed(
    model: PreTrainedModel, headers: dict[str, TensorInfo], weights_format: str, folder: Path, dtype: torch.dtype
) -> None:
    """Replace the linear layers whose weights are packed in the checkpoint."""
    modules = dict(model.named_modules())
    expert_prefixes = tuple(f"{name}." for name, module in modules.items() if isinstance(module, Experts))
    for layer in packed_tensors(headers, weights_format):
        dense = modules.get(layer)
        if not isinstance(dense, nn.Linear):
            raise CheckpointError(
                f"{folder} has a packed weight for {layer}, which isn't a linear layer of the model; check config.json"
            )
        nested = f"{layer}.weight.nested_absmax" in headers
        try:
            packed = PackedLinear(
                dense.in_features,
                dense.out_features,
                weights_format,
                bias=dense.bias is not None,
                nested=nested,
                dtype=dtype,
                device="meta",
            )
        except FormatError as error:
            raise CheckpointError(f"{folder}: {layer}: {error}") from None
        packed.keepable = not layer.startswith(expert_prefixes)
        model.set_submodule(layer, packed)


def _empty_slots(
    folder: Path, headers: dict[str, TensorInfo], dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, _Slot]]:
    """A checkpoint's model without weights, and every tensor that the files must have, by its name there."""
    check_layers(folder, headers)
    model: PreTrainedModel = empty_model(config_of(folder), dtype)
    _insert_packed(model, headers, weights_format_of(folder), folder, dtype)
    slots: dict[str, _Slot] = {}
    for prefix, module in model.named_modules():
        stored = {}
        if isinstance(module, PackedLinear):
            codec = CODECS[module.weights_format]
            stored = {name: codec.checkpoint_name(name) for name in module.packed_names}
        for name in (*module._parameters, *module._buffers):
            if getattr(module, name) is None or name in module._non_persistent_buffers_set:
                continue
            slots[f"{prefix}.{stored.get(name, name)}"] = module, name
        if stored:  # NF4's metadata, which hold an offset, have no tensor of their own without one
            slots.setdefault(f"{prefix}.{codec.marker}", (module, "weight_nested_offset"))
    _check_names(slots, headers, tied_weights(folder), folder)
    return model, slots


def _check_names(slots: dict[str, _Slot], headers: dict[str, TensorInfo], tied: tuple[str, ...], folder: Path) -> None:
    missing = [name for name in slots if name not in headers and name not in tied[:1]]
    superfluous = [name for name in headers if name not in slots]
    if missing and superfluous:
        raise CheckpointError(
            f"{folder} lacks {missing[0]}, which its config.json calls for, and holds {superfluous[0]}, which it "
            "doesn't; either config.json belongs to other weights, or files of this kind of model have names that "
            "aren't supported"
        )
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} tensors that its config.json calls for, such as {missing[0]}; "
            "download the checkpoint again"
        )
    if superfluous:
        raise CheckpointError(
            f"{headers[superfluous[0]].shard} holds {len(superfluous)} tensors that its config.json doesn't call for, "
            f"such as {superfluous[0]}; check that config.json belongs to these weights"
        )


def _is_packed(module: nn.Module, name: str) -> bool:
    return isinstance(module, PackedLinear) and name in module.packed_names


def _fill(slot: _Slot, name: str, tensor: Tensor, dtype: torch.dtype, info: TensorInfo) -> None:
    """Store a tensor of the file in its parameter or buffer."""
    module, own_name = slot
    if name.endswith(CODECS["nf4"].marker):
        try:
            _, offset = read_nf4_state(tensor)
        except FormatError as error:
            raise CheckpointError(f"{info.shard}: {error}") from None
        if offset is not None:
            setattr(module, own_name, offset)
        return
    target, packed = getattr(module, own_name), _is_packed(module, own_name)
    fits = tensor.dtype == target.dtype if packed else tensor.is_floating_point()
    if tensor.shape != target.shape or not fits:
        raise _mismatch(name, info, target)
    tensor = tensor if packed else converted(info, tensor, dtype)
    setattr(module, own_name, tensor if own_name in module._buffers else nn.Parameter(tensor))


def _mismatch(name: str, info: TensorInfo, target: Tensor) -> CheckpointError:
    return CheckpointError(
        f"{info.shard} holds {name} as {info.dtype} {list(info.shape)}, but config.json calls for "
        f"{target.dtype} {list(target.shape)}; check that config.json belongs to these weights"
    )


def _check_tied(weights: Sequence[Tensor], info: TensorInfo) -> None:
    if not torch.equal(*weights):
        raise CheckpointError(
            f"{info.shard} holds a head that differs from the embedding, though config.json ties them; "
            "set tie_word_embeddings to false there"
        )


@torch.no_grad()
def _restore_computed_buffers(model: PreTrainedModel, device: torch.device | str) -> None:
    """Compute buffers again that the meta device lost and no checkpoint has, such as rotary frequencies."""
    for module in model.modules():
        lost = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for name in lost:
            setattr(module, name, torch.empty_like(getattr(module, name), device=device))
        if lost:
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers leaves it as it is
            model._init_weights(module)
    meta = [name for name, tensor in model.state_dict(keep_vars=True).items() if tensor.is_meta]
    if meta:
        raise RuntimeError(f"no tensor was loaded for {meta[0]}: a defect of qerl")
