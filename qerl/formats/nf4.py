"""NF4, bitsandbytes' 4-bit NormalFloat (QLoRA, arXiv 2305.14314): in plain PyTorch, on a GPU by bitsandbytes' kernels.

A weight is quant_map[code] * absmax, one absmax for 64 weights of the flattened tensor, two codes a byte, high nibble
first. Double quantization stores absmax in 8 bits: nested_quant_map[code] * nested_absmax + offset, one nested_absmax
for 256 of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qerl.settings.models import FORMATS, FormatError

#: bitsandbytes' blocks.
GROUP_SIZE = FORMATS["nf4"].group_size
#: Bytes of JSON; bitsandbytes writes about 200.
_LONGEST_STATE = 4096

#: Quantiles of a normal distribution, scaled to [-1, 1] (QLoRA, arXiv 2305.14314, Appendix E).
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
#: Blocks of absmax that share one scale under double quantization.
NESTED_GROUP_SIZE = 256
#: The dtypes of activations that bitsandbytes' kernels support.
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Name of an NF4 weight's metadata in a checkpoint.
STATE_NAME = "weight.quant_state.bitsandbytes__nf4"


def tensor_specs(shape: tuple[int, int], nested: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor of a `Packed` of this shape; `nested`: with double quantization."""
    count = math.prod(shape)
    blocks = count // GROUP_SIZE
    specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "weight_packed": ((count // 2, 1), torch.uint8),
        "weight_absmax": ((blocks,), torch.uint8 if nested else torch.float32),
        "weight_quant_map": ((16,), torch.float32),
    }
    if nested:
        specs["weight_nested_absmax"] = ((math.ceil(blocks / NESTED_GROUP_SIZE),), torch.float32)
        specs["weight_nested_quant_map"] = ((256,), torch.float32)
        specs["weight_nested_offset"] = ((1,), torch.float32)
    return specs


@cache
def _nf4_map(device: torch.device) -> Tensor:
    return torch.tensor(_NF4, dtype=torch.float32, device=device)


@cache
def _dynamic_map(device: torch.device) -> Tensor:
    """The 256 values of the signed 8-bit dynamic data type (arXiv 1511.04561): one decade for each exponent."""
    magnitudes: list[float] = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        magnitudes += ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
    values = sorted([0.0, 1.0, *magnitudes, *(-magnitude for magnitude in magnitudes)])
    return torch.tensor(values, dtype=torch.float32, device=device)


# QLoRA defines NF4 with double quantization (4.127 bits per weight). The paper says "default", which in bitsandbytes
# means without; the codec reads both.
def quantize(weight: Tensor, global_scale: Tensor | None, double_quant: bool) -> dict[str, Tensor]:
    """The tensors of a `Packed` for a weight [out, in] (float32 or bfloat16); there is no global scale."""
    blocks = weight.float().reshape(-1, GROUP_SIZE)
    absmax = blocks.abs().amax(-1)
    table = _nf4_map(weight.device)
    scaled = (blocks * (1.0 / absmax.clamp(min=1e-38)).unsqueeze(-1)).clamp(-1, 1)
    codes = torch.bucketize(scaled, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8).view(-1)
    tensors = {"weight_packed": ((codes[::2] << 4) | codes[1::2]).unsqueeze(1)}
    if not double_quant:
        return {**tensors, "weight_absmax": absmax, "weight_quant_map": table.clone()}
    offset = absmax.mean()
    if offset.isinf():  # the float32 sum of bitsandbytes' mean overflows, though the mean of finite numbers is finite
        offset = absmax.double().mean().float()
    nested, nested_absmax = _quantize_dynamic(absmax - offset)
    return {
        **tensors,
        "weight_absmax": nested,
        "weight_quant_map": table.clone(),
        "weight_nested_absmax": nested_absmax,
        "weight_nested_quant_map": _dynamic_map(weight.device).clone(),
        "weight_nested_offset": offset.reshape(1),
    }


def _quantize_dynamic(values: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit codes [n] and the largest magnitude of each block of 256, float32 [ceil(n/256)]."""
    count = values.numel()
    padded = torch.nn.functional.pad(values, (0, -count % NESTED_GROUP_SIZE)).view(-1, NESTED_GROUP_SIZE)
    absmax = padded.abs().amax(-1)
    scaled = (padded * (1.0 / absmax).unsqueeze(-1)).view(-1)[:count]
    # bitsandbytes' CPU code looks the nearest code up on a grid of 2^16 points; a block of zeros has code 0 throughout.
    scaled = ((scaled + 1) * 0.5 * 65535 + 0.5).floor().nan_to_num(0.0).clamp(0, 65535) * (2 / 65535) - 1
    table = _dynamic_map(values.device)
    lower = (torch.searchsorted(table, scaled, right=True) - 1).clamp(0, 254)
    nearer = (scaled - table[lower + 1]).abs() < (scaled - table[lower]).abs()
    return (lower + nearer).to(torch.uint8), absmax


def dequantize(tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The weight [out, in] in `dtype`: computed in float32, rounded once."""
    if tensors["weight_packed"].is_cuda and dtype in KERNEL_DTYPES:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(tensors["weight_packed"], _quant_state(tensors, shape, dtype))
    absmax = tensors["weight_absmax"]
    if "weight_nested_absmax" in tensors:
        scale = tensors["weight_nested_absmax"].repeat_interleave(NESTED_GROUP_SIZE)[: absmax.numel()]
        absmax = tensors["weight_nested_quant_map"][absmax.long()] * scale + tensors["weight_nested_offset"]
    packed = tensors["weight_packed"].view(-1)
    codes = torch.stack((packed >> 4, packed & 0xF), dim=-1)
    values = tensors["weight_quant_map"][codes.view(-1, GROUP_SIZE).int()] * absmax.unsqueeze(-1)
    return values.view(shape).to(dtype)


def largest(tensors: Mapping[str, Tensor]) -> tuple[str, float]:
    """See `Codec.largest`."""
    tops = {name: tensor.double().abs().max().item() for name, tensor in tensors.items() if tensor.is_floating_point()}
    if "weight_nested_absmax" not in tops:
        return "weight.absmax", tops["weight_quant_map"] * tops["weight_absmax"]
    absmax = tops["weight_nested_quant_map"] * tops["weight_nested_absmax"] + tops["weight_nested_offset"]
    return "weight.absmax", tops["weight_quant_map"] * absmax


# NF4 is a baseline here, and QLoRA's users run bitsandbytes' kernels.
def multiply(x: Tensor, tensors: Mapping[str, Tensor], shape: tuple[int, int], bias: Tensor | None) -> Tensor:
    """x [m, in] W^T + bias [out] on a GPU, without gradients, in the dtype of x, one of `KERNEL_DTYPES`."""
    from bitsandbytes import matmul_4bit

    with torch.no_grad():
        return matmul_4bit(x, tensors["weight_packed"], _quant_state(tensors, shape, x.dtype), bias=bias)


def _quant_state(tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Any:
    """bitsandbytes' quantization state of a weight."""
    from bitsandbytes.functional import QuantState

    state = QuantState(
        tensors["weight_absmax"], torch.Size(shape), tensors["weight_quant_map"], GROUP_SIZE, "nf4", dtype
    )
    if "weight_nested_absmax" in tensors:
        state.nested, state.offset = True, tensors["weight_nested_offset"]
        state.state2 = QuantState(
            tensors["weight_nested_absmax"],
            code=tensors["weight_nested_quant_map"],
            blocksize=NESTED_GROUP_SIZE,
            dtype=torch.float32,
        )
    return state


def checkpoint_name(name: str) -> str:
    """Name in a checkpoint of a tensor of a `Packed`; the offset is part of the metadata there."""
    if name == "weight_nested_offset":
        return STATE_NAME
    return "weight" if name == "weight_packed" else name.replace("weight_", "weight.", 1)


def from_checkpoint(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """Tensors and shape of a `Packed` from a layer's tensors in a checkpoint."""
    state = read_state(tensors[STATE_NAME])
    nested = "nested_offset" in state
    rows, columns = state["shape"]
    packed = {name: tensors[checkpoint_name(name)] for name in tensor_specs((rows, columns), nested)}
    if nested:
        packed["weight_nested_offset"] = offset(state, tensors["weight"].device)
    return packed, (rows, columns)


def to_checkpoint(tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """The inverse of `from_checkpoint`; `dtype` is the unpacked weight's dtype in the metadata."""
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": GROUP_SIZE,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
    }
    named = {checkpoint_name(name): tensor for name, tensor in tensors.items()}
    if "weight_nested_offset" in tensors:
        nested_offset = tensors["weight_nested_offset"].item()
        state |= {"nested_blocksize": NESTED_GROUP_SIZE, "nested_dtype": "float32", "nested_offset": nested_offset}
    return {**named, STATE_NAME: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}


def offset(state: Mapping[str, Any], device: torch.device) -> Tensor:
    """Offset of the doubly quantized absmax, float32 [1]."""
    return torch.tensor([state["nested_offset"]], dtype=torch.float32, device=device)


def read_state(tensor: Tensor) -> dict[str, Any]:
    """The metadata of an NF4 weight: JSON in a uint8 tensor. Raises `FormatError` if this module can't decode it."""
    again = "quantize it again"
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or len(tensor) > _LONGEST_STATE:
        raise FormatError(f"NF4 weight has metadata that is no text of at most {_LONGEST_STATE} bytes; {again}")
    try:
        state = json.loads(bytes(tensor.cpu().tolist()))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict) or not _is_shape(state.get("shape")):
        raise FormatError(f"NF4 weight has metadata that is no JSON object with a shape; {again}")
    nested_offset = state.get("nested_offset", 0.0)
    if not isinstance(nested_offset, float | int) or not abs(nested_offset) <= torch.finfo(torch.float32).max:
        raise FormatError(f"NF4 weight has a nested_offset that is no finite number; {again}")
    expected = {"quant_type": "nf4", "blocksize": GROUP_SIZE}
    if "nested_offset" in state:
        expected |= {"nested_blocksize": NESTED_GROUP_SIZE, "nested_dtype": "float32"}
    for key, value in expected.items():
        if state.get(key) != value:
            raise FormatError(f"NF4 weight has {key}={state.get(key)!r}, only {value!r} is supported; {again}")
    return state


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and len(shape) == 2 and all(type(size) is int and size > 0 for size in shape)
