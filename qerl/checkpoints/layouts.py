"""The tensors of a checkpoint under this package's names, whichever library wrote the files, without torch.

The names are those of compressed-tensors: a packed layer has `weight_packed`, `weight_scale` and, with NVFP4,
`weight_global_scale`. ModelOpt names the same codes and scales `weight`, `weight_scale` and `weight_scale_2`. Its last
is the reciprocal of the global scale. `qerl.checkpoints.tensors` reads tensors as their `TensorInfo` says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from qerl.checkpoints.text_models import is_within, own_name
from qerl.formats.errors import FormatError

#: What a tensor is made of: the file's values, their reciprocals, the bytes of 8-bit exponents, FP8 values times their
#: scale, or packed codes that are unpacked because no packed layer may be there.
Reading = Literal["stored", "reciprocal", "bytes", "scaled", "unpacked"]

#: Rotary frequencies, which older files of Llama hold and config.json states, and masks in those of GPT-NeoX.
_COMPUTED = (".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
#: Suffixes of scales by which other engines round activations, keys and values. Nothing here reads them.
_OF_ACTIVATIONS = (".input_scale", ".input_global_scale", ".q_scale", ".k_scale", ".v_scale", ".output_scale")
#: ModelOpt's tensors of layers that also scale their input, or add a product of low rank.
_OTHER_FUNCTIONS = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b")
#: The output head is dense in this package.
_HEAD = "lm_head"
#: The head's weight in files of GPT-NeoX, which transformers names as in other models.
_HEAD_OF_NEOX = "embed_out.weight"
#: A stack of experts' tensors, and the names of its parts here.
_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(?:_(blocks|scales|bias))?")
_STACKED = {"blocks": "weight_packed", "scales": "weight_scale", "bias": "bias"}
#: The layers of an expert that a dense stack has one after the other.
_DENSE = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
#: A tensor of a mixture in files of Mixtral, and the names of its experts' layers here.
_OF_MIXTRAL = re.compile(r"(.*)\.block_sparse_moe\.(gate|experts\.\d+)(?:\.(w[123]))?\.(.+)")
_LAYERS_OF_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
#: The same tensor here.
_OF_MIXTURE = re.compile(r"(.*)\.mlp\.(gate|experts\.\d+)(?:\.(gate_proj|up_proj|down_proj))?\.(.+)")
#: A router's correction of scores in files of Ernie 4.5 and EXAONE, and the same tensor here.
_CORRECTION = re.compile(r"(.*\.mlp)\.((?:moe_statics\.)?e_score_correction_bias)")
_OF_ROUTER = re.compile(r"(.*\.mlp)\.gate\.((?:moe_statics\.)?e_score_correction_bias)")
#: Rows and columns of a block of FP8 weights that shares a scale.
FP8_BLOCK = 128


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's file, its safetensors dtype ("BF16", "U8", ...), shape, and size in bytes there.

    `stored` is its name in the file. `parts` are the further tensors that its `reading` needs. With `place` it is that
    one of the tensors that are stacked there, and with `rows` its rows from the first number to before the second.
    """

    shard: Path
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    stored: str
    reading: Reading = "stored"
    parts: tuple[TensorInfo, ...] = ()
    place: int | None = None
    rows: tuple[int, int] | None = None


def own_layout(stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors by this package's names, in the files' order, without scales of activations and rotary frequencies.

    A model of images and text has those of its text model, and experts that are stacked have their own each.
    FP8 weights become dense weights, and so does a packed output head. Raises `FormatError` for FP8 scales of an
    unknown shape, for an incomplete head, and for layers that compute more than a product with their weight.
    """
    stored = dict(_of_experts({_named_here(name): info for name, info in _of_text(stored).items()}))
    tensors = dict(named for name, info in stored.items() if (named := _own(name, info, stored)))
    packed = {name: tensors.pop(name) for name in list(tensors) if name.startswith(f"{_HEAD}.weight_")}
    return {**tensors, f"{_HEAD}.weight": _unpacked(packed)} if packed else tensors


def names_in_files(headers: Mapping[str, TensorInfo]) -> Callable[[str], str]:
    """How tensors are named in files like those of `headers`: as here, but for parts of some mixtures."""
    if any(_OF_MIXTRAL.fullmatch(info.stored) for info in headers.values()):
        return _of_mixtral
    return _with_corrections if any(_CORRECTION.fullmatch(info.stored) for info in headers.values()) else str


def _named_here(name: str) -> str:
    return _CORRECTION.sub(r"\1.gate.\2", _renamed(name, _OF_MIXTRAL, "mlp", _LAYERS_OF_MIXTRAL))


def _with_corrections(name: str) -> str:
    return _OF_ROUTER.sub(r"\1.\2", name)


def _of_mixtral(name: str) -> str:
    stored = {layer: short for short, layer in _LAYERS_OF_MIXTRAL.items()}
    return _renamed(name, _OF_MIXTURE, "block_sparse_moe", stored)


def _renamed(name: str, of_mixture: re.Pattern[str], mixture: str, layers: Mapping[str, str]) -> str:
    match = of_mixture.fullmatch(name)
    if match is None:
        return name
    block, part, layer, tensor = match.groups()
    return ".".join(filter(None, (block, mixture, part, layers.get(layer), tensor)))


def _of_text(stored: Mapping[str, TensorInfo]) -> Mapping[str, TensorInfo]:
    """The tensors of the text model, by its names."""
    if not any(map(is_within, stored)):
        return stored
    named = ((own_name(name), info) for name, info in stored.items())
    return {name: info for name, info in named if name is not None}


def _of_experts(stored: Mapping[str, TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
    """The tensors, with those of each expert in place of stacks."""
    for name, info in stored.items():
        stack = _STACK.fullmatch(name)
        if stack is None:
            yield name, info
            continue
        experts, layer, part = stack.groups()
        if part is None and f"{name}_bias" not in stored:
            yield from _of_dense_stack(experts, layer, info)
        elif part is not None and len(info.shape) > 1:
            yield from _of_packed_stack(experts, f"{layer}.{_STACKED[part]}", info)
        else:
            raise FormatError(
                f"{info.shard} holds {name} {list(info.shape)}, a stack of experts in another format than MXFP4, which "
                "isn't supported; take the checkpoint in MXFP4 as it is published"
            )


def _of_packed_stack(experts: str, part: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    """The tensors of each expert, of a stack as gpt-oss has it.

    It has blocks [experts, out, groups, 16] of codes, scales [experts, out, groups], or a bias [experts, out].
    """
    count, rows, *columns = info.shape
    shape = (rows, math.prod(columns)) if columns else (rows,)
    for place in range(count):
        yield f"{experts}.{place}.{part}", replace(info, shape=shape, size_bytes=info.size_bytes // count, place=place)


def _of_dense_stack(experts: str, layer: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    """The weights of each expert, of a stack [experts, out, in] as Qwen3.5 has it, with gate's rows before up's."""
    layers = _DENSE[layer]
    if len(info.shape) != 3 or info.shape[1] % len(layers):
        raise FormatError(
            f"{info.shard} holds {info.stored} {list(info.shape)}, which is no stack [experts, out, in] of weights of "
            "experts; download the checkpoint again"
        )
    count, rows, columns = info.shape[0], info.shape[1] // len(layers), info.shape[2]
    size = info.size_bytes // (count * len(layers))
    for place in range(count):
        for number, name in enumerate(layers):
            part = replace(info, shape=(rows, columns), size_bytes=size, place=place)
            yield f"{experts}.{place}.{name}.weight", replace(part, rows=(number * rows, (number + 1) * rows))


def unpacked_layers(headers: Mapping[str, TensorInfo]) -> list[str]:
    """The layers that are stored in FP8 or packed, and are dense in this package."""
    return [name.removesuffix(".weight") for name, info in headers.items() if info.reading in ("scaled", "unpacked")]


def _own(name: str, info: TensorInfo, stored: Mapping[str, TensorInfo]) -> tuple[str, TensorInfo] | None:
    """A tensor's name and reading in this package; None if another tensor includes it or nothing reads it."""
    layer, _, part = name.rpartition(".")
    weight = stored.get(f"{layer}.weight")
    if name.endswith((*_OF_ACTIVATIONS, *_COMPUTED)):
        return None
    if part in _OTHER_FUNCTIONS:
        raise FormatError(
            f"{info.shard} holds {name}, with which {layer} computes more than a product with its weight; take a "
            "checkpoint without, or the dense one"
        )
    if weight is not None and weight.dtype == "F8_E4M3":
        return _own_fp8(layer, part, info, stored)
    if part == "weight" and info.dtype == "U8" and f"{layer}.weight_scale_2" in stored:
        return f"{layer}.weight_packed", info
    if part == "weight_scale_2":
        shape = (1,) if math.prod(info.shape) == 1 else info.shape
        return f"{layer}.weight_global_scale", replace(info, shape=shape, reading="reciprocal")
    if part == "weight_scale" and info.dtype == "F8_E8M0":
        return name, replace(info, dtype="U8", reading="bytes")
    return (f"{_HEAD}.weight" if name == _HEAD_OF_NEOX else name), info


def _own_fp8(
    layer: str, part: str, info: TensorInfo, stored: Mapping[str, TensorInfo]
) -> tuple[str, TensorInfo] | None:
    scale = stored.get(f"{layer}.weight_scale") or stored.get(f"{layer}.weight_scale_inv")
    if part in ("weight_scale", "weight_scale_inv"):
        return None
    if part != "weight" or scale is None:
        return f"{layer}.{part}", info
    if len(info.shape) != 2 or scale.dtype not in ("F32", "BF16", "F16") or not _scales(scale.shape, info.shape):
        raise FormatError(
            f"{info.shard} holds {layer}.weight in FP8 {list(info.shape)} with a scale {scale.dtype} "
            f"{list(scale.shape)}; only a scale a tensor, a row, or a block of {FP8_BLOCK} x {FP8_BLOCK} is supported"
        )
    return f"{layer}.weight", replace(info, reading="scaled", parts=(scale,))


def is_of_rows(scale: tuple[int, ...], rows: int) -> bool:
    """Whether an FP8 scale of this shape has a value for each row of a weight."""
    return scale in ((rows,), (rows, 1))


def blocks_of(weight: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of blocks of an FP8 weight [out, in] whose blocks share a scale."""
    return -(-weight[0] // FP8_BLOCK), -(-weight[1] // FP8_BLOCK)


def _scales(scale: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    """Whether a scale of this shape is one of a tensor, of each row, or of each block, whose dimensions may be 1."""
    narrow, blocks = (tuple(size for size in shape if size != 1) for shape in (scale, blocks_of(weight)))
    return math.prod(scale) == 1 or is_of_rows(scale, weight[0]) or narrow == blocks


def _unpacked(packed: dict[str, TensorInfo]) -> TensorInfo:
    """The output head as a dense weight, of its packed tensors."""
    codes, scale, whole = (packed.get(f"{_HEAD}.weight_{part}") for part in ("packed", "scale", "global_scale"))
    if codes is None or scale is None or len(codes.shape) != 2 or len(packed) != 2 + (whole is not None):
        raise FormatError(f"the packed {_HEAD} has only {', '.join(packed)}; download the checkpoint again")
    rows, half = codes.shape
    parts = (codes, scale) if whole is None else (codes, scale, whole)
    return TensorInfo(
        codes.shard, codes.dtype, (rows, 2 * half), sum(part.size_bytes for part in parts), codes.stored,
        "unpacked", parts,
    )  # fmt: skip
