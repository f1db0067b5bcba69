"""Products with packed 4-bit weights, and with narrow dense layers, in Triton for GPUs from Ampere on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import num_warps
from triton.language.target_info import cuda_capability_geq

from qerl.formats.layouts import BLOCK_COLUMNS, Words
from qerl.kernels.state import COEFFICIENTS, Activation, RowRuns, workspace
from qerl.kernels.triton.launch import begin, dependent, kernel, let_next_start, wait_for_earlier

# Operands of the portable products, and how these are divided among programs: by rows of x and by layer size. The
# choice depends on nothing measured at run time, so that equal inputs give equal bits in every run on a kind of GPU.

#: Registers of a multiprocessor, on all supported GPUs.
REGISTERS = 64 * 1024
#: The fewest blocks of columns of a split, and the most splits.
_LEAST_SPAN, _MOST_SPLITS = 2, 16


@dataclass(frozen=True)
class Tile:
    """The part of a product that one program computes."""

    n: int  # rows of W
    m: int  # rows of x
    warps: int
    stages: int  # of the pipeline
    #: Programs that fit a multiprocessor, up to which W's columns are divided. Grouped products never divide them.
    programs: int = 1

    def splits(self, rows: int, rows_of_w: int, blocks: int, processors: int) -> int:
        """The number of parts into which W's `blocks` blocks of columns are divided."""
        tiles = -(-rows_of_w // self.n) * -(-rows // self.m)
        most = self.programs * processors // tiles
        return max(1, min(most, blocks // _LEAST_SPAN, _MOST_SPLITS))

    @property
    def registers(self) -> int:
        """The most registers of a thread with which `programs` fit a multiprocessor."""
        return min(REGISTERS // (self.programs * self.warps * 32) // 8 * 8, 255)


@dataclass(frozen=True)
class PortableOperands:
    """Weights of layers with the same input, with their biases and adapters."""

    words: Words
    factors: Tensor  # [rows] float32, of each row of W
    bias: Tensor | None  # [rows] float32
    down: Tensor  # [rank, columns] bfloat16, of all layers
    up: Tensor  # [rows, rank] bfloat16, block-diagonal, with the adapters' scales
    runs: RowRuns | None = None  # of a cohort
    run_of_rank: Tensor | None = None  # [rank] int32, with `runs`

    @property
    def rank(self) -> int:
        """The sum of the layers' ranks."""
        return len(self.down)


def ranks_at_once(rank: int, most: int) -> int:
    """The ranks of an adapter that a program multiplies at a time: a power of two, no fewer than an instruction."""
    return min(max(1 << (rank - 1).bit_length(), 16), most)


#: By the most rows of x: the fastest of those timed with 7B's shapes on an H200 (docs/lab/portable.md). With two warps,
#: the compiler takes mma.sync on Hopper, too, and no two warps decode the same weights.
_TILES = {
    8: Tile(64, 8, 4, 7, programs=5),
    16: Tile(64, 16, 2, 6, programs=4),
    32: Tile(64, 32, 2, 4, programs=4),
    64: Tile(64, 64, 4, 3, programs=3),
}
_MANY = Tile(64, 128, 4, 3, programs=2)


def tile_for(rows: int) -> Tile:
    """The tile of a product with `rows` rows of x."""
    return next((tile for most, tile in _TILES.items() if rows <= most), _MANY)


def tiles() -> list[Tile]:
    """All tiles that `tile_for` gives."""
    return [*_TILES.values(), _MANY]


# Decoding of `qerl.formats.layouts.Words` in Triton, and the kernel that unpacks a layer for products by cuBLAS.

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


@kernel
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


# Products with packed weights in Triton: out = W x + b + B (A x).
#
# A program multiplies some rows of W by some rows of x. It decodes codes and scales in registers, in the layout that
# the tensor cores read, and sums in float32. The result's first dimension is that of W's rows, so that 8 rows of x are
# enough for an instruction.
#
# Where tiles are fewer than a GPU has room for, programs divide W's columns too. They write their sums, and the last
# one of a tile adds them in order. The first programs of the launch compute A x, for which those that finish a tile
# wait.

#: Rows of A of a program, the fewest that fill an instruction.
SHRINK_ROWS = tl.constexpr(16)
#: What a program that finishes a tile adds to the count of those that computed A x.
_FINISHED = tl.constexpr(1 << 16)
#: Blocks of columns whose codes come into L2 while the previous kernel ends.
EARLY_BLOCKS = tl.constexpr(4)
_GELU_A, _GELU_B = map(tl.constexpr, COEFFICIENTS["gelu_pytorch_tanh"])


@triton.jit
def _product(
    codes, scales, x, n, m, rows_of_w, columns, first, last,
    GROUPS: tl.constexpr, MULTIPLIER: tl.constexpr, OFFSET: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """W x^T [N, M], without W's factor, of W's rows n [N] and x's rows m [M] over blocks of columns."""
    codes += (first * rows_of_w + n)[:, None] * 16 + tl.arange(0, 16)[None, :]
    scales += (first * rows_of_w + n)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    x += m.to(tl.int64)[None, :] * columns + first * 128 + tl.arange(0, 128)[:, None]
    total = tl.zeros([n.shape[0], m.shape[0]], tl.float32)
    for _ in tl.range(first, last, num_stages=STAGES):
        word = tl.load(codes).to(tl.uint32, bitcast=True)
        weight = weight_values(word, tl.load(scales), MULTIPLIER, OFFSET, x.dtype.element_ty)
        total = tl.dot(weight, tl.load(x), total, input_precision="ieee")
        codes += rows_of_w * 16
        scales += rows_of_w * GROUPS
        x += 128
        wait_for_products()
    return total


@triton.jit
def rows_of_tile(tile, r, width, N: tl.constexpr, GATED: tl.constexpr):
    """The rows of W that are rows r of a tile; with GATED, half of them are gate's and half are up's.

    Rows that don't exist are read as the last one, and not written.
    """
    if GATED:
        row = tl.minimum(tile * (N // 2) + r % (N // 2), width - 1) + r // (N // 2) * width
    else:
        row = tl.minimum(tile * N + r, width - 1)
    return row


@triton.jit
def _prefetch(codes, tile, rows_of_w, first, last, width, N: tl.constexpr, GATED: tl.constexpr):
    """Bring the codes of a tile's first blocks of columns into L2, 128 bytes a time."""
    lines: tl.constexpr = N // 2  # of a block; a row has 64 bytes
    line = tl.arange(0, EARLY_BLOCKS * lines)
    block = tl.minimum(first + line // lines, last - 1)
    row = rows_of_tile(tile, line % lines * 2, width, N, GATED)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [(codes + (block * rows_of_w + row) * 16).to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _shrink(down, x, r, m, columns, first, last, STAGES: tl.constexpr):
    """A x^T [R, M] of A's rows r [R] and x's rows m [M] over blocks of columns."""
    column = tl.arange(0, 128)
    down += r[:, None] * columns + first * 128 + column[None, :]
    x += m.to(tl.int64)[None, :] * columns + first * 128 + column[:, None]
    total = tl.zeros([r.shape[0], m.shape[0]], tl.float32)
    for _ in tl.range(first, last, num_stages=STAGES):
        total = tl.dot(tl.load(down), tl.load(x), total, input_precision="ieee")
        down += 128
        x += 128
    return total


@triton.jit
def of_own_run(shrunk, rank, m, runs, run_of_rank, r_inside, m_inside, RUNS: tl.constexpr):
    """A x of ranks and rows of x, broadcast against each other, with 0 where rank and row are of different runs."""
    if RUNS:
        own = tl.load(run_of_rank + rank, r_inside, other=-1) == tl.load(runs + m, m_inside, other=-2)
        shrunk = tl.where(own, shrunk, 0.0)
    return shrunk


@triton.jit
def _have_common_run(rank, m, runs, run_of_rank, RUNS: tl.constexpr):
    """Whether any of some ranks [R] is of the run of any of the rows m [M] of x; both exist. True without runs."""
    common = True
    if RUNS:
        own = tl.load(run_of_rank + rank)[:, None] == tl.load(runs + m)[None, :]
        common = tl.max(tl.max(own.to(tl.int32), 1), 0) > 0
    return common


@triton.jit
def _plus_adapter(
    y, up, sums, runs, run_of_rank, n, m, rows,
    RANK: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """y [N, M] plus B (A x), with A x as float32 sums [SPLITS, rows, RANK], which are added in order and rounded."""
    rank = tl.arange(0, RANKS)
    for first in range(0, RANK, RANKS):
        r = first + rank
        if _have_common_run(tl.minimum(r, RANK - 1), m, runs, run_of_rank, RUNS):
            place = sums + m[None, :] * RANK + r[:, None]
            s = tl.zeros([RANKS, m.shape[0]], tl.float32)
            for _ in tl.range(0, SPLITS):
                s += tl.load(place, (r < RANK)[:, None], other=0.0)
                place += rows * RANK
            s = of_own_run(s, r[:, None], m[None, :], runs, run_of_rank, (r < RANK)[:, None], (m < rows)[None, :], RUNS)
            b = tl.load(up + n[:, None] * RANK + r[None, :], (r < RANK)[None, :], other=0.0)
            y = tl.dot(b, s.to(up.dtype.element_ty), y, input_precision="ieee")
    return y


@triton.jit
def _scaled(total, factors, bias, n, BIASED: tl.constexpr):
    """Sums [N, M] times the factors of W's rows, plus the bias."""
    y = total * tl.load(factors + n)[:, None]
    if BIASED:
        y += tl.load(bias + n)[:, None]
    return y


@triton.jit
def store_tile(y, out, n, m, rows, width, RESIDUAL: tl.constexpr):
    """Write y [N, M] to out [rows, width], or add it."""
    place = out + m.to(tl.int64)[None, :] * width + n[:, None]
    inside = (n < width)[:, None] & (m < rows)[None, :]
    if RESIDUAL:
        y += tl.load(place, inside, other=0.0).to(tl.float32)
    tl.store(place, y.to(out.dtype.element_ty), inside)


@triton.jit
def _arrive(counter):
    """Count this program after what it stored, and return how many were counted before."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def _send_shrunk(
    down, x, shrink_sums, runs, run_of_rank, number, m, m_read, rows, columns, first, last, split,
    RANK: tl.constexpr, RUNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write A x of a split's columns, for a few rows of A if they are of the run of a row of x: their tile is in
    shared memory.
    """
    rank = number * SHRINK_ROWS + tl.arange(0, SHRINK_ROWS)
    read = tl.minimum(rank, RANK - 1)
    if _have_common_run(read, m_read, runs, run_of_rank, RUNS):
        shrunk = _shrink(down, x, read, m_read, columns, first, last, STAGES)
        exists = (rank < RANK)[:, None] & (m < rows)[None, :]
        tl.store(shrink_sums + (split * rows + m)[None, :] * RANK + rank[:, None], shrunk, exists)


@triton.jit
def _wait_for_shrunk(counter, senders, tiles):
    """Wait for the `senders` programs that compute A x. The last one of `tiles` sets the counter to 0 again."""
    seen = tl.atomic_add(counter, _FINISHED, sem="acq_rel", scope="gpu") + _FINISHED
    last = seen // _FINISHED == tiles
    while (seen >= _FINISHED) & (seen % _FINISHED < senders):  # a counter of 0 has been complete
        seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    if last:
        tl.atomic_xchg(counter, 0, sem="release", scope="gpu")


@triton.jit
def _summed(place, SPLITS: tl.constexpr):
    """The sums [N, M] of all splits of a tile, in order, of the first split's `place`."""
    total = tl.load(place)
    for split in tl.range(1, SPLITS):
        total += tl.load(place + split * (place.shape[0] * place.shape[1]))
    return total


@triton.jit
def _finish(
    y, factors, bias, up, runs, run_of_rank, shrink_sums, shrunk_counter, out, tile, n, m, rows, tiles, width,
    RANK: tl.constexpr, RANKS: tl.constexpr, SENDERS: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr,
    ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a tile, of its sums y [N, M] of all columns."""
    N: tl.constexpr = y.shape[0]
    if RANK:
        _wait_for_shrunk(shrunk_counter, SENDERS, tiles)
    y = _scaled(y, factors, bias, n, BIASED)
    if RANK:
        row = tl.minimum(m, rows - 1)
        y = _plus_adapter(y, up, shrink_sums, runs, run_of_rank, n, row, rows, RANK, RANKS, SPLITS, RUNS)
    if ACTIVATION != "":
        gate, above = tl.split(y.reshape(2, N // 2, y.shape[1]).permute(1, 2, 0))
        inner = gate
        if ACTIVATION == "gelu_pytorch_tanh":
            inner = gate * (gate * gate * _GELU_B + _GELU_A)
        store_tile(
            gate * tl.sigmoid(inner) * above, out, tile * (N // 2) + tl.arange(0, N // 2), m, rows, width, RESIDUAL
        )
    else:
        store_tile(y, out, tile * N + tl.arange(0, N), m, rows, width, RESIDUAL)


@kernel(do_not_specialize=["rows", "blocks", "tiles", "span", "row_blocks"])
def fused_product(
    codes, scales, factors, bias, down, up, runs, run_of_rank, x, out, sums, shrink_sums, counters,
    rows, rows_of_w, columns, blocks, tiles, span, row_blocks, width,
    GROUPS: tl.constexpr, MULTIPLIER: tl.constexpr, OFFSET: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    SPLITS: tl.constexpr, BIASED: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr,
    RUNS: tl.constexpr, N: tl.constexpr, M: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The outputs [rows, width]. A split has `span` blocks of columns.

    `sums` [row blocks, tiles, SPLITS, N, M] and `shrink_sums` [SPLITS, rows, RANK] are float32. `counters`, of each
    tile and then of each row block, are 0 before and after the launch.
    """
    SHRINKS: tl.constexpr = (RANK + SHRINK_ROWS - 1) // SHRINK_ROWS
    senders = SHRINKS * SPLITS * row_blocks
    program = tl.program_id(0)
    # Programs start in order, so that those which are waited for run first.
    part = tl.where(program < senders, program, program - senders)
    parts = tl.where(program < senders, SHRINKS, tiles)
    tile, row_block, split = part % parts, part // parts % row_blocks, part // parts // row_blocks
    first = split * span
    last = tl.minimum(first + span, blocks)
    m = row_block * M + tl.arange(0, M)
    m_read = tl.minimum(m, rows - 1)
    shrunk_counter = counters + row_blocks * tiles + row_block
    let_next_start(PDL)
    if program < senders:
        wait_for_earlier(PDL)
        _send_shrunk(
            down, x, shrink_sums, runs, run_of_rank, tile, m, m_read, rows, columns, first, last, split,
            RANK, RUNS, STAGES,
        )  # fmt: skip
        _arrive(shrunk_counter)
    else:
        if PDL:  # earlier kernels don't write weights
            _prefetch(codes, tile, rows_of_w, first, last, width, N, ACTIVATION != "")
        wait_for_earlier(PDL)
        r = tl.arange(0, N)
        n = rows_of_tile(tile, r, width, N, ACTIVATION != "")
        total = _product(
            codes, scales, x, n, m_read, rows_of_w, columns, first, last, GROUPS, MULTIPLIER, OFFSET, STAGES
        )
        number = row_block * tiles + tile
        place = sums + number.to(tl.int64) * (SPLITS * N * M) + r[:, None] * M + tl.arange(0, M)[None, :]
        finishes = True
        if SPLITS > 1:
            tl.store(place + split * (N * M), total)
            finishes = _arrive(counters + number) == SPLITS - 1
        if finishes:
            if SPLITS > 1:
                tl.atomic_xchg(counters + number, 0, sem="relaxed", scope="gpu")
                total = _summed(place, SPLITS)
            _finish(
                total, factors, bias, up, runs, run_of_rank, shrink_sums, shrunk_counter, out, tile, n, m, rows,
                tiles, width, RANK, RANKS, SHRINKS * SPLITS, SPLITS, BIASED, ACTIVATION, RESIDUAL, RUNS,
            )  # fmt: skip


# Launches of the portable products.

#: The most ranks of an adapter that a program multiplies at a time.
_MOST_RANKS = 32


def multiply(
    operands: PortableOperands,
    x: Tensor,
    out: Tensor,
    residual: bool = False,
    activation: Activation | None = None,
    tile: Tile | None = None,
) -> None:
    """Write the product with x [m, columns] to out [m, width], both bfloat16 and contiguous; see `FusedLinear`.

    `tile` replaces that of `tile_for`.
    """
    tile = tile or tile_for(len(x))
    words, rank, rows, width = operands.words, operands.rank, *out.shape
    multiplier, offset = words.scale_decode
    blocks, pdl, space = words.columns // BLOCK_COLUMNS, dependent(x.device), workspace(x.device)
    span = -(-blocks // tile.splits(rows, words.rows, blocks, space.processors))
    splits, row_blocks = -(-blocks // span), triton.cdiv(rows, tile.m)
    tiles = triton.cdiv(width, tile.n // 2 if activation else tile.n)
    divided = splits if splits > 1 else 0
    sums = torch.empty(row_blocks * tiles * divided * tile.n * tile.m, dtype=torch.float32, device=x.device)
    shrunk = torch.empty(splits, rows, rank, dtype=torch.float32, device=x.device)
    senders = triton.cdiv(rank, SHRINK_ROWS.value)
    bias = operands.factors if operands.bias is None else operands.bias  # the former isn't read
    runs, run_of_rank = runs_of(operands.runs, operands.run_of_rank, x)
    fused_product[((senders + tiles) * row_blocks * splits,)](
        words.codes, words.scales, operands.factors, bias, operands.down, operands.up, runs, run_of_rank,
        x, out, sums, shrunk,
        space.get("arrivals", row_blocks * (tiles + 1)), rows, words.rows, words.columns, blocks, tiles, span,
        row_blocks, width,
        GROUPS=BLOCK_COLUMNS // words.group, MULTIPLIER=multiplier, OFFSET=offset & 0xFFFF,
        RANK=rank, RANKS=ranks_at_once(rank, _MOST_RANKS), SPLITS=splits,
        BIASED=operands.bias is not None, ACTIVATION=activation or "", RESIDUAL=residual,
        RUNS=operands.runs is not None, N=tile.n, M=tile.m, STAGES=tile.stages,
        num_warps=tile.warps, maxnreg=tile.registers, **pdl,
    )  # fmt: skip


def runs_of(runs: RowRuns | None, run_of_rank: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """The run of each row and of each rank, or tensors that aren't read in their place."""
    return (x, x) if runs is None or run_of_rank is None else (runs.rows, run_of_rank)


# The product of a narrow dense layer with its adapter in Triton, out = W x + B (A x), as one launch for few rows of x.
#
# A program multiplies some rows of W or A by the rows of x, over some of the columns. The last program of a block of
# rows adds all sums in order, and then B (A x). The same product by cuBLAS takes five launches.

#: Rows of W or A of a program, columns that it reads at a time, and columns of a split.
_N, _K, _SPAN = 16, 128, 640


@kernel
def _narrow(
    x, weight, down, up, runs, run_of_rank, out, sums, counters, rows, columns, width,
    RANK: tl.constexpr, RANKS: tl.constexpr, RUNS: tl.constexpr, WIDTHS: tl.constexpr, SPLITS: tl.constexpr,
    SPAN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles, weight_tiles = tl.num_programs(0), tl.cdiv(width, N)
    m, n, k = block * M + tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    if tile < weight_tiles:
        matrix, row, count = weight, tile * N, width
    else:
        matrix, row, count = down, (tile - weight_tiles) * N, RANK
    begin(PDL)
    total = tl.zeros([M, N], tl.float32)
    for column in tl.range(split * SPAN, tl.minimum((split + 1) * SPAN, columns), K, num_stages=3):
        inside = column + k < columns
        a = tl.load(x + m[:, None] * columns + column + k[None, :], (m < rows)[:, None] & inside[None, :], other=0.0)
        place = matrix + (row + n)[None, :] * columns + column + k[:, None]
        b = tl.load(place, (row + n < count)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    # Sums are [blocks, SPLITS, tiles, M, N].
    sums += block * SPLITS * tiles * M * N
    tl.store(sums + (split * tiles + tile) * (M * N) + tl.arange(0, M)[:, None] * N + n[None, :], total)
    tl.debug_barrier()
    if tl.atomic_add(counters + block, 1, sem="acq_rel", scope="gpu") == SPLITS * tiles - 1:
        tl.atomic_xchg(counters + block, 0, sem="relaxed", scope="gpu")
        wide = tl.arange(0, WIDTHS)
        y = _sum_of_splits(sums, wide, 0, tiles, width, SPLITS, M, N)
        if RANK:
            rank = tl.arange(0, RANKS)
            shrunk = _sum_of_splits(sums, rank, weight_tiles, tiles, RANK, SPLITS, M, N)
            shrunk = of_own_run(
                shrunk, rank[None, :], m[:, None], runs, run_of_rank, (rank < RANK)[None, :], (m < rows)[:, None], RUNS
            ).to(up.dtype.element_ty)
            mask = (rank < RANK)[:, None] & (wide < width)[None, :]
            b = tl.load(up + wide[None, :] * RANK + rank[:, None], mask, other=0.0)
            y = tl.dot(shrunk, b, y, input_precision="ieee")
        target = out + m[:, None] * width + wide[None, :]
        tl.store(target, y.to(out.dtype.element_ty), (m < rows)[:, None] & (wide < width)[None, :])


@triton.jit
def _sum_of_splits(sums, number, first, tiles, count, SPLITS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The sums [M, numbers] over all splits, in order, of the rows `number` of the matrix whose first tile is given."""
    place = sums + (first + number // N)[None, :] * (M * N) + tl.arange(0, M)[:, None] * N + (number % N)[None, :]
    total = tl.zeros([M, number.shape[0]], tl.float32)
    for split in tl.range(0, SPLITS):
        total += tl.load(place + split * tiles * (M * N), (number < count)[None, :], other=0.0)
    return total


def narrow_product(
    x: Tensor,
    weight: Tensor,
    down: Tensor,
    up: Tensor,
    out: Tensor,
    runs: RowRuns | None = None,
    run_of_rank: Tensor | None = None,
) -> None:
    """Write x W^T + (x A^T) B^T to out [m, N], with x [m, K], W [N, K], A [R, K] and B [N, R].

    All are contiguous and of one dtype. Sums are float32, and A x is rounded to the dtype. With `runs` a row takes the
    ranks of its own run, which `run_of_rank` [R] int32 names.
    """
    (rows, columns), width, rank, space = x.shape, len(weight), len(down), workspace(x.device)
    size = min(max(16, triton.next_power_of_2(rows)), 64)
    tiles, splits, blocks = -(-width // _N) + -(-rank // _N), -(-columns // _SPAN), -(-rows // size)
    sums = torch.empty(blocks * splits * tiles * size * _N, dtype=torch.float32, device=x.device)
    _narrow[(tiles, splits, blocks)](
        x, weight, down, up, *runs_of(runs, run_of_rank, x), out, sums, space.get("narrow_arrivals", blocks),
        rows, columns, width,
        RANK=rank, RANKS=max(16, triton.next_power_of_2(rank)), RUNS=runs is not None,
        WIDTHS=max(16, triton.next_power_of_2(width)), SPLITS=splits, SPAN=_SPAN, M=size, N=_N, K=_K, num_warps=4,
        **dependent(x.device),
    )  # fmt: skip


# Copies of many tensors to bfloat16 by one kernel; with different dtypes `torch._foreach_copy_` launches one each.

_BLOCK = 8192


@kernel
def _copy(targets, sources, sizes, widths, strides, BLOCK: tl.constexpr, PDL: tl.constexpr):
    tensor, block = tl.program_id(0), tl.program_id(1)
    begin(PDL)
    size, width = tl.load(sizes + tensor), tl.load(widths + tensor)
    place = block * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + tensor).to(tl.pointer_type(tl.float32))
    target = tl.load(targets + tensor).to(tl.pointer_type(tl.bfloat16))
    to = place // width * tl.load(strides + tensor) + place % width
    tl.store(target + to, tl.load(source + place, place < size).to(tl.bfloat16), place < size)


class Copies:
    """Copies matrices `sources` (float32, contiguous) into `targets` (bfloat16, with contiguous rows) at each call."""

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        device = targets[0].device
        self._kept_alive = [*targets, *sources]
        self._targets = torch.tensor([tensor.data_ptr() for tensor in targets], device=device)
        self._sources = torch.tensor([tensor.data_ptr() for tensor in sources], device=device)
        # Of 32 bits, because the kernel divides by widths.
        integers = partial(torch.tensor, dtype=torch.int32, device=device)
        self._sizes = integers([tensor.numel() for tensor in sources])
        self._widths = integers([tensor.shape[1] for tensor in targets])
        self._strides = integers([tensor.stride(0) for tensor in targets])
        self._grid = len(sources), triton.cdiv(max(tensor.numel() for tensor in sources), _BLOCK)

    def __call__(self) -> None:
        """Copy the present values of the sources."""
        pdl = dependent(self._targets.device)
        tensors = self._targets, self._sources, self._sizes, self._widths, self._strides
        _copy[self._grid](*tensors, BLOCK=_BLOCK, num_warps=8, **pdl)
