"""Decoding of `qerl.formats.words` in Triton, and the kernel that unpacks a layer for products by cuBLAS."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import num_warps
from triton.language.target_info import cuda_capability_geq

from qerl.formats.words import BLOCK_COLUMNS, Words

_ROWS = 32
#: Whether kernels run on a CPU, where there is no machine code.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _value(bits, dtype: tl.constexpr):
    """The bfloat16 with the lower 16 bits of words, or the same value as float32."""
    if dtype == tl.float32:
        value = (bits << 16).to(tl.float32, bitcast=True)
    else:
        value = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value


@triton.jit
def code_pairs(word):
    """The codes of words uint32 [rows, n] in pairs of bfloat16, uint32 [rows, 4 n], times 2^-126."""
    first = word & 0x81C081C0
    second = ((word >> 6) | (word << 26)) & 0x81C081C0
    third = ((word << 4) | (word >> 28)) & 0x81C081C0
    fourth = ((word << 6) & 0x80C080C0) | ((word >> 2) & 0x01000100)
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
    return pairs.reshape(word.shape[0], 4 * word.shape[1])


@triton.jit
def code_values(word, dtype: tl.constexpr):
    """The values of codes times 2^-126, [rows, 8 n] of words uint32 [rows, n], in bfloat16 or float32."""
    pairs = code_pairs(word)
    return tl.join(_value(pairs, dtype), _value(pairs >> 16, dtype)).reshape(word.shape[0], 8 * word.shape[1])


@triton.jit
def scaled_halves(pairs, scales):
    """The lower and upper halves of pairs of bfloat16 times those of scales, both in words."""
    # Triton's own operations on halves cost two permutations a pair. The third operand, -0, keeps the sign of a zero.
    return tl.inline_asm_elementwise(
        "{ .reg .b32 y, z; mov.b32 z, 0x80008000; fma.rn.bf16x2 y, $2, $3, z; mov.b32 {$0, $1}, y; }",
        "=h,=h,r,r", [pairs, scales], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def wait_for_products():
    """Wait at the end of a loop for products whose left operand is in registers.

    On Hopper they are asynchronous, and Triton 3.6 waits for the first eighth alone before the next turn of the loop
    overwrites these registers (its issue 9433). Other GPUs' products aren't, nor are those of fewer than four warps or
    of eight columns, for which there is nothing to wait.
    """
    if not INTERPRETED and cuda_capability_geq(9) and not cuda_capability_geq(10) and num_warps() >= 4:
        tl.inline_asm_elementwise(
            "wgmma.wait_group.sync.aligned 0; mov.b32 $0, 0;", "=r,r", [tl.program_id(0)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def scale_values(byte, MULTIPLIER: tl.constexpr, OFFSET: tl.constexpr, dtype: tl.constexpr):
    """The values of scales times 2^118, of bytes, in bfloat16 or float32."""
    return _value(byte.to(tl.uint32) * MULTIPLIER + OFFSET, dtype)


@triton.jit
def weight_values(word, byte, MULTIPLIER: tl.constexpr, OFFSET: tl.constexpr, dtype: tl.constexpr):
    """Code times scale times 2^-8, exact, [rows, 128] of words [rows, 16] and bytes [rows, groups]."""
    groups: tl.constexpr = byte.shape[1]
    if dtype == tl.float32 or INTERPRETED:
        codes = code_values(word, dtype).reshape(word.shape[0], groups, 128 // groups)
        weight = codes * scale_values(byte, MULTIPLIER, OFFSET, dtype)[:, :, None]
    else:
        pairs = code_pairs(word).reshape(word.shape[0], groups, 64 // groups)
        scales = ((byte.to(tl.uint32) * MULTIPLIER + OFFSET) & 0xFFFF) * 0x10001
        lower, upper = scaled_halves(pairs, tl.broadcast_to(scales[:, :, None], pairs.shape))
        weight = tl.join(lower, upper)
    return weight.reshape(word.shape[0], 128)


@triton.jit
def _unpack(
    codes, scales, out, divisor, first, rows, all_rows, columns,
    GROUPS: tl.constexpr, MULTIPLIER: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    inside = (row < rows)[:, None]
    place = (block * all_rows + first + row)[:, None]
    word = tl.load(codes + place * 16 + tl.arange(0, 16)[None, :], inside, other=0).to(tl.uint32, bitcast=True)
    byte = tl.load(scales + place * GROUPS + tl.arange(0, GROUPS)[None, :], inside, other=0)
    code = code_values(word, tl.float32).reshape(ROWS, GROUPS, 128 // GROUPS) * 8.507059173023462e37  # 2^126
    scale = scale_values(byte, MULTIPLIER, OFFSET, tl.float32) * 3.009265538105056e-36  # 2^-118
    weight = (code * tl.div_rn(scale, divisor + 0.0 * scale)[:, :, None]).reshape(ROWS, 128)
    column = block * 128 + tl.arange(0, 128)[None, :]
    if TAIL:  # the last block has columns that the weight lacks
        inside &= column < columns
    tl.store(out + row.to(tl.int64)[:, None] * columns + column, weight.to(out.dtype.element_ty), inside)


def dense(words: Words, part: int, dtype: torch.dtype) -> Tensor:
    """The weight of a layer in `dtype`, [rows, columns], bit for bit equal to that of `formats.dequantize`."""
    rows = words.parts[part]
    out = torch.empty(rows, words.columns, dtype=dtype, device=words.data.device)
    multiplier, offset = words.scale_decode
    _unpack[(triton.cdiv(rows, _ROWS), words.blocks)](
        words.codes, words.scales, out, words.divisors[part], sum(words.parts[:part]), rows, words.rows, words.columns,
        GROUPS=BLOCK_COLUMNS // words.group, MULTIPLIER=multiplier, OFFSET=offset & 0xFFFF, ROWS=_ROWS,
        TAIL=words.columns % BLOCK_COLUMNS != 0,
    )  # fmt: skip
    return out
