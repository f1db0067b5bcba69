"""Codecs of the 4-bit weight formats in plain PyTorch, the reference for kernels.

A weight W [out_features, in_features] is stored as 4-bit codes and scales (paper section 2):

* NVFP4: W = e2m1 * e4m3 / global_scale, one E4M3 scale for 16 weights of a row, one FP32 global scale a tensor;
* MXFP4: W = e2m1 * 2^(e8m0 - 127), one E8M0 scale for 32 weights of a row;
* NF4: W = quant_map[code] * absmax, one absmax for 64 weights of the flattened tensor. bitsandbytes rounds to it, and
  unpacks on a GPU.

NVFP4 and MXFP4 follow compressed-tensors: two codes a byte, low nibble first. NF4 is bitsandbytes' 4-bit NormalFloat
(QLoRA, arXiv 2305.14314): high nibble first.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, Field, PositiveInt, ValidationError
from torch import Tensor

from qerl.settings.models import FORMATS, FormatError

#: Formats with packed weights.
PACKED_FORMATS = tuple(FORMATS)
#: Names, shapes and dtypes of the tensors of a packed weight.
Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_MAX = 6.0
_E4M3_MAX = 448.0
#: Replaces an E4M3 scale that rounds to zero.
_E4M3_ZERO = 0.125
_E8M0_BIAS = 127
_LARGEST = 2.0**126
#: floor(log2(6)): exponent of the largest E2M1 value.
_E2M1_EXPONENT = 2


@dataclass(frozen=True)
class Packed:
    """A weight [out_features, in_features] in a 4-bit format.

    Tensors by format (n = out * in):

    * nvfp4: weight_packed uint8 [out, in/2], weight_scale float8_e4m3fn [out, in/16], weight_global_scale float32 [1];
    * mxfp4: weight_packed uint8 [out, in/2], weight_scale uint8 [out, in/32];
    * nf4: weight_packed uint8 [n/2, 1], weight_absmax float32 [n/64], weight_quant_map float32 [16];
    * nf4 with double quantization: weight_absmax uint8 [n/64], and in addition weight_nested_absmax float32
      [ceil(n/64/256)], weight_nested_quant_map float32 [256], weight_nested_offset float32 [1].
    """

    weights_format: str
    shape: tuple[int, int]
    tensors: dict[str, Tensor]


def split_rows(packed: Packed, rows: int) -> list[Packed]:
    """Parts of `rows` rows each of an NVFP4 or MXFP4 weight, without a copy.

    Raises `FormatError` for NF4, whose tensors aren't stored by rows, and unless `rows` divides the weight's.
    """
    if packed.weights_format == "nf4" or packed.shape[0] % rows:
        raise FormatError(f"can't split {packed.shape[0]} rows of {packed.weights_format} into parts of {rows}")
    by_row = {name: tensor.split(rows) for name, tensor in packed.tensors.items() if len(tensor) == packed.shape[0]}
    return [
        Packed(
            packed.weights_format,
            (rows, packed.shape[1]),
            {**packed.tensors, **{name: parts[number] for name, parts in by_row.items()}},
        )
        for number in range(packed.shape[0] // rows)
    ]


def joined(parts: Sequence[Packed]) -> Packed:
    """The inverse of `split_rows`: one weight of `parts`, which have one global scale, with their rows in order."""
    if len(parts) == 1:
        return parts[0]
    first, rows = parts[0], sum(part.shape[0] for part in parts)
    tensors = {
        name: torch.cat([part.tensors[name].view(torch.uint8) for part in parts]).view(tensor.dtype)
        if len(tensor) == first.shape[0]
        else tensor
        for name, tensor in first.tensors.items()
    }
    return Packed(first.weights_format, (rows, first.shape[1]), tensors)


class Codec(ABC):
    """A format of `FORMATS`. A `shape` is a weight's [out, in]; tensors have the names of `Packed`."""

    #: Name in a checkpoint, without the layer's own, of a tensor that only packed layers have.
    marker = "weight_packed"

    @abstractmethod
    def tensor_specs(self, shape: tuple[int, int], nested: bool) -> Specs:
        """Shape and dtype of each tensor; `nested` (NF4 only): with double quantization."""

    @abstractmethod
    def quantize(self, weight: Tensor, global_scale: Tensor | None, double_quant: bool) -> dict[str, Tensor]:
        """The tensors of a contiguous weight in float32 or bfloat16; see `codecs.quantize` for the options."""

    @abstractmethod
    def dequantize(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The weight [out, in] in `dtype`: computed in float32, rounded once."""

    @abstractmethod
    def largest(self, tensors: Mapping[str, Tensor]) -> tuple[str, float]:
        """A bound on the weight's magnitudes, NaN if a tensor has NaN, with the name of the tensor that decides it."""

    @abstractmethod
    def from_checkpoint(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[int, int]]:
        """Tensors and shape of a weight from a layer's tensors in a checkpoint."""

    def checkpoint_name(self, name: str) -> str:
        """Name of a tensor in a checkpoint, without the layer's own."""
        return name


def tensor_specs(weights_format: str, shape: tuple[int, int], nested: bool = True) -> Specs:
    """Shape and dtype of each tensor of a `Packed`; `nested` (NF4 only): with double quantization."""
    _check_group(weights_format, shape[1])
    return CODECS[weights_format].tensor_specs(shape, nested)


def stored_bytes(weights_format: str, shapes: Iterable[tuple[int, int]]) -> int:
    """Bytes of weights of these shapes [out, in] in a format, with scales and tables, or in "bf16"."""
    if weights_format == "bf16":
        return torch.bfloat16.itemsize * sum(map(math.prod, shapes))
    specs = (spec for shape in shapes for spec in tensor_specs(weights_format, shape).values())
    return sum(math.prod(size) * dtype.itemsize for size, dtype in specs)


def quantize(
    weight: Tensor, weights_format: str, *, global_scale: Tensor | None = None, double_quant: bool = True
) -> Packed:
    """Round a weight [out, in] (float32 or bfloat16) to the nearest codes, without calibration.

    `global_scale` (NVFP4) is float32 [1], shared with the layers that are fused with this one (`nvfp4_global_scale`).
    `double_quant` (NF4) stores absmax in 8 bits. Raises `FormatError` if the format's group doesn't divide `in`, or if
    no format can hold a weight (`check_magnitudes`).
    """
    if weight.dim() != 2 or weight.dtype not in (torch.float32, torch.bfloat16):
        raise FormatError(
            f"can't quantize a {weight.dtype} tensor of {weight.dim()} dimensions: pass a float32 or bfloat16 matrix"
        )
    _check_group(weights_format, weight.shape[1])
    weight = weight.detach().contiguous()
    check_magnitudes(weight, "the weight")
    tensors = CODECS[weights_format].quantize(weight, global_scale, double_quant)
    return Packed(weights_format, (weight.shape[0], weight.shape[1]), tensors)


def check_magnitudes(weight: Tensor, name: str) -> None:
    """Raise `FormatError`, which names the weight, if it is empty or has NaN, infinity or a magnitude over 2^126.

    Above that, a code of 6 or a scale that is rounded up overflows float32.
    """
    if not weight.numel() or not weight.abs().max() <= _LARGEST:
        raise FormatError(f"can't quantize {name}: it is empty, or holds NaN or magnitudes over 2^126")


def dequantize(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] in `dtype`: computed in float32, rounded once."""
    return CODECS[packed.weights_format].dequantize(packed.tensors, packed.shape, dtype)


def check_scales(packed: Packed) -> None:
    """Raise `FormatError`, which names the tensor, if scales of a weight make infinity or NaN of codes.

    What counts is the scale as it multiplies: NVFP4 divides by the global scale, and NF4's scales are products. The
    largest code times it must be finite in float32 and bfloat16.
    """
    name, top = CODECS[packed.weights_format].largest(packed.tensors)
    if not top <= torch.finfo(torch.bfloat16).max:
        raise FormatError(f"{name} makes weights infinite or NaN; download the checkpoint again, or quantize it again")


def _check_group(weights_format: str, columns: int) -> None:
    if weights_format not in FORMATS:
        raise FormatError(f"unknown weights format {weights_format!r}; use one of {', '.join(PACKED_FORMATS)}")
    size = FORMATS[weights_format].group_size
    if columns % size:
        raise FormatError(
            f"{weights_format} shares a scale among {size} weights of a row, which doesn't divide the input dimension "
            f"{columns}; use another format or a model whose dimensions are multiples of {size}"
        )


def from_checkpoint(weights_format: str, tensors: Mapping[str, Tensor]) -> Packed:
    """A layer's tensors by their names in a checkpoint, without the layer's own name, as a `Packed`.

    Raises `FormatError` for an NF4 state with other block sizes or data types, and as
    `check_scales` does.
    """
    renamed, shape = CODECS[weights_format].from_checkpoint(tensors)
    packed = Packed(weights_format, shape, renamed)
    check_scales(packed)
    return packed


# --- E2M1: NVFP4 and MXFP4, as compressed-tensors stores them --------------------------------------------------------


def _e2m1_codes(scaled: Tensor) -> Tensor:
    """Nearest E2M1 code (sign in bit 3) of each value; ties go to the even code, as IEEE 754 rounds."""
    magnitude = scaled.abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for index, (low, high) in enumerate(pairwise(_E2M1)):
        middle = (low + high) / 2
        # The tie belongs to the upper value exactly if its code, index + 1, is even.
        code += (magnitude >= middle) if index % 2 else (magnitude > middle)
    return code | ((scaled < 0).to(torch.uint8) << 3)


@cache
def _e2m1_values(device: torch.device) -> Tensor:
    return torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32, device=device)


@cache
def _e8m0_values(device: torch.device) -> Tensor:
    # 255 is infinity here, as in compressed-tensors; in the OCP specification it is NaN.
    return torch.tensor([2.0 ** (exponent - _E8M0_BIAS) for exponent in range(256)], dtype=torch.float32, device=device)


class _E2m1(Codec):
    """Codes of a row two a byte, low nibble first, and one scale [out, in / group] for each group of them."""

    name: ClassVar[str]
    scale_dtype: ClassVar[torch.dtype]

    def tensor_specs(self, shape: tuple[int, int], nested: bool) -> Specs:
        rows, columns = shape
        scales = (rows, columns // FORMATS[self.name].group_size)
        return {"weight_packed": ((rows, columns // 2), torch.uint8), "weight_scale": (scales, self.scale_dtype)}

    def from_checkpoint(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[int, int]]:
        rows, half = tensors["weight_packed"].shape
        return dict(tensors), (rows, 2 * half)

    def _groups(self, weight: Tensor) -> Tensor:
        return weight.view(weight.shape[0], -1, FORMATS[self.name].group_size)

    def _codes(self, groups: Tensor, scale: Tensor) -> Tensor:
        """Packed codes, uint8 [out, in / 2], of groups [out, in / group, group] by scales in float32."""
        codes = _e2m1_codes(groups.float() / scale.unsqueeze(-1))
        return (codes[..., ::2] | (codes[..., 1::2] << 4)).view(len(groups), -1)

    def _weight(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """The inverse of `_codes`."""
        values = _e2m1_values(codes.device)[torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2).int()]
        return (self._groups(values) * scale.unsqueeze(-1)).view(values.shape).to(dtype)


# q, k, v have one global scale, and gate, up another: llmcompressor writes them so, and engines that fuse these
# layers need it.
def nvfp4_global_scale(*weights: Tensor) -> Tensor:
    """Global scale, float32 [1], shared by weights that run fused (q, k, v; gate, up).

    It maps their largest magnitude to 6 * 448. It is computed in the weights' dtype; if that overflows, it is 1.
    """
    largest = torch.stack([weight.abs().max() for weight in weights]).max()
    scale = _E4M3_MAX * _E2M1_MAX / largest.clamp(min=torch.finfo(largest.dtype).tiny)
    return torch.where(scale.isfinite(), scale, torch.ones_like(scale)).float().reshape(1)


class _Nvfp4(_E2m1):
    name, scale_dtype = "nvfp4", torch.float8_e4m3fn

    def tensor_specs(self, shape: tuple[int, int], nested: bool) -> Specs:
        return {**super().tensor_specs(shape, nested), "weight_global_scale": ((1,), torch.float32)}

    def quantize(self, weight: Tensor, global_scale: Tensor | None, double_quant: bool) -> dict[str, Tensor]:
        global_scale = nvfp4_global_scale(weight) if global_scale is None else global_scale
        groups = self._groups(weight)
        # The division happens in the weight's dtype, the product with the global scale in float32.
        scale = (groups.abs().amax(-1) / _E2M1_MAX).float() * global_scale
        stored = scale.clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn)
        stored = torch.where(stored.float() == 0, torch.full_like(scale, _E4M3_ZERO), stored.float())
        return {
            "weight_packed": self._codes(groups, stored / global_scale),
            "weight_scale": stored.to(torch.float8_e4m3fn),
            "weight_global_scale": global_scale.clone(),
        }

    def dequantize(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        scale = tensors["weight_scale"].float() / tensors["weight_global_scale"]
        return self._weight(tensors["weight_packed"], scale, dtype)

    def largest(self, tensors: Mapping[str, Tensor]) -> tuple[str, float]:
        smallest = tensors["weight_global_scale"].min().item()
        return "weight_global_scale", _E4M3_MAX * _E2M1_MAX / smallest if smallest > 0 else math.inf


class _Mxfp4(_E2m1):
    name, scale_dtype = "mxfp4", torch.uint8

    def quantize(self, weight: Tensor, global_scale: Tensor | None, double_quant: bool) -> dict[str, Tensor]:
        groups = self._groups(weight).float()
        # Largest magnitude rounded to a power of two, upwards from 1.75: adding a quarter to the mantissa carries over.
        exponent = (groups.abs().amax(-1).view(torch.int32) + (1 << 21)) >> 23
        scale = (exponent - _E2M1_EXPONENT).clamp(min=0).to(torch.uint8)
        codes = self._codes(groups, _e8m0_values(groups.device)[scale.long()])
        return {"weight_packed": codes, "weight_scale": scale}

    def dequantize(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        codes = tensors["weight_packed"]
        return self._weight(codes, _e8m0_values(codes.device)[tensors["weight_scale"].long()], dtype)

    def largest(self, tensors: Mapping[str, Tensor]) -> tuple[str, float]:
        return "weight_scale", _E2M1_MAX * 2.0 ** (int(tensors["weight_scale"].max()) - _E8M0_BIAS)


# --- NF4, as bitsandbytes stores it ----------------------------------------------------------------------------------
#
# Double quantization stores absmax in 8 bits: nested_quant_map[code] * nested_absmax + offset, with one nested_absmax
# for 256 of them. QLoRA defines NF4 with it (4.127 bits per weight). The paper says "default", which in bitsandbytes
# means without; the codec reads both.

_GROUP_SIZE = FORMATS["nf4"].group_size
#: Blocks of absmax that share one scale under double quantization.
_NESTED_GROUP_SIZE: Literal[256] = 256
#: The dtypes of activations that bitsandbytes' kernels support.
NF4_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Name of an NF4 weight's metadata in a checkpoint.
_STATE_NAME = "weight.quant_state.bitsandbytes__nf4"


class _State(BaseModel, strict=True):
    """The metadata of an NF4 weight that this module decodes."""

    quant_type: Literal["nf4"]
    blocksize: Literal[64]
    shape: tuple[PositiveInt, PositiveInt]
    nested_blocksize: Literal[256] = _NESTED_GROUP_SIZE
    nested_dtype: Literal["float32"] = "float32"
    nested_offset: float | None = Field(None, ge=torch.finfo(torch.float32).min, le=torch.finfo(torch.float32).max)


def read_nf4_state(tensor: Tensor) -> tuple[tuple[int, int], Tensor | None]:
    """Shape and offset of an NF4 weight by its metadata, JSON in a uint8 tensor.

    The offset belongs to a doubly quantized absmax, float32 [1]; None without double quantization. Raises `FormatError`
    if this module can't decode the weight.
    """
    try:
        state = _State.model_validate_json(tensor.cpu().numpy().tobytes())
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "text"
        raise FormatError(
            f"NF4 weight has metadata whose {where} is missing, no finite number or of another quantization; quantize "
            "it again"
        ) from None
    offset = state.nested_offset
    return state.shape, None if offset is None else torch.tensor([offset], dtype=torch.float32, device=tensor.device)


class _Nf4(Codec):
    marker = _STATE_NAME

    def tensor_specs(self, shape: tuple[int, int], nested: bool) -> Specs:
        count = math.prod(shape)
        blocks = count // _GROUP_SIZE
        specs: Specs = {
            "weight_packed": ((count // 2, 1), torch.uint8),
            "weight_absmax": ((blocks,), torch.uint8 if nested else torch.float32),
            "weight_quant_map": ((16,), torch.float32),
        }
        if nested:
            specs["weight_nested_absmax"] = ((math.ceil(blocks / _NESTED_GROUP_SIZE),), torch.float32)
            specs["weight_nested_quant_map"] = ((256,), torch.float32)
            specs["weight_nested_offset"] = ((1,), torch.float32)
        return specs

    def quantize(self, weight: Tensor, global_scale: Tensor | None, double_quant: bool) -> dict[str, Tensor]:
        from bitsandbytes.functional import quantize_4bit

        codes, state = quantize_4bit(weight, blocksize=_GROUP_SIZE, quant_type="nf4", compress_statistics=double_quant)
        tensors = {"weight_packed": codes, "weight_absmax": state.absmax, "weight_quant_map": state.code}
        if double_quant:
            tensors |= {
                "weight_nested_absmax": state.state2.absmax,
                "weight_nested_quant_map": state.state2.code,
                "weight_nested_offset": state.offset.reshape(1),
            }
        return tensors

    def dequantize(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        if tensors["weight_packed"].is_cuda and dtype in NF4_KERNEL_DTYPES:
            from bitsandbytes.functional import dequantize_4bit

            return dequantize_4bit(tensors["weight_packed"], _quant_state(tensors, shape, dtype))
        absmax = tensors["weight_absmax"]
        if "weight_nested_absmax" in tensors:
            scale = tensors["weight_nested_absmax"].repeat_interleave(_NESTED_GROUP_SIZE)[: absmax.numel()]
            absmax = tensors["weight_nested_quant_map"][absmax.long()] * scale + tensors["weight_nested_offset"]
        packed = tensors["weight_packed"].view(-1)
        codes = torch.stack((packed >> 4, packed & 0xF), dim=-1)
        values = tensors["weight_quant_map"][codes.view(-1, _GROUP_SIZE).int()] * absmax.unsqueeze(-1)
        return values.view(shape).to(dtype)

    def largest(self, tensors: Mapping[str, Tensor]) -> tuple[str, float]:
        numbers = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        tops = {name: tensor.double().abs().max().item() for name, tensor in numbers.items()}
        if "weight_nested_absmax" not in tops:
            return "weight.absmax", tops["weight_quant_map"] * tops["weight_absmax"]
        absmax = tops["weight_nested_quant_map"] * tops["weight_nested_absmax"] + tops["weight_nested_offset"]
        return "weight.absmax", tops["weight_quant_map"] * absmax

    def from_checkpoint(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[int, int]]:
        shape, offset = read_nf4_state(tensors[_STATE_NAME])
        named = tensors if offset is None else {**tensors, _STATE_NAME: offset}
        specs = self.tensor_specs(shape, nested=offset is not None)
        return {name: named[self.checkpoint_name(name)] for name in specs}, shape

    def checkpoint_name(self, name: str) -> str:
        if name == "weight_nested_offset":
            return _STATE_NAME
        return "weight" if name == "weight_packed" else name.replace("weight_", "weight.", 1)


# NF4 is a baseline here, and QLoRA's users run bitsandbytes' kernels.
def multiply_nf4(x: Tensor, tensors: Mapping[str, Tensor], shape: tuple[int, int], bias: Tensor | None) -> Tensor:
    """x [m, in] W^T + bias [out] on a GPU, without gradients, in the dtype of x, one of `NF4_KERNEL_DTYPES`."""
    from bitsandbytes import matmul_4bit

    with torch.no_grad():
        return matmul_4bit(x, tensors["weight_packed"], _quant_state(tensors, shape, x.dtype), bias=bias)


def _quant_state(tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Any:
    """bitsandbytes' quantization state of a weight."""
    from bitsandbytes.functional import QuantState

    state = QuantState(
        tensors["weight_absmax"], torch.Size(shape), tensors["weight_quant_map"], _GROUP_SIZE, "nf4", dtype
    )
    if "weight_nested_absmax" in tensors:
        state.nested, state.offset = True, tensors["weight_nested_offset"]
        state.state2 = QuantState(
            tensors["weight_nested_absmax"],
            code=tensors["weight_nested_quant_map"],
            blocksize=_NESTED_GROUP_SIZE,
            dtype=torch.float32,
        )
    return state


CODECS: dict[str, Codec] = {"nvfp4": _Nvfp4(), "mxfp4": _Mxfp4(), "nf4": _Nf4()}
