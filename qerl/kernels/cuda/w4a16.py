"""The decode product in CUDA C++, out = W x + b + B (A x) for 4-bit W, and the kernels that unpack W."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from math import e, log2
from pathlib import Path

import torch
from torch import Tensor

from qerl.formats import layouts
from qerl.formats.layouts import Tiles, Words
from qerl.kernels.cuda.jit import address, flat_tensor_map, launch, params_struct, tensor_map
from qerl.kernels.state import COEFFICIENTS, Activation, RowRuns, Workspace, workspace

# The compiled variants of the decode product, by the rows of x and the size of the layer.

#: Shared memory that keeps two thread blocks of a launch off one multiprocessor. Otherwise, if a norm's block occupies
#: a multiprocessor, two blocks of the product share another and delay all: 28 % of a step at one sequence.
ONE_PER_SM_BYTES = 116000
#: Rows of A in a stage of the pipeline, beyond 32 rows of x. With fewer rows separate warps compute A x, because
#: further stages would delay their thread blocks by more than the work takes. With more, they'd read x too often.
SHRINK_ROWS = 32
#: Without stages of A: the fewest and most spans of columns into which A x is divided, by the number of A's rows.
_SPANS = (8, 40)
#: Ranks of an adapter that an instruction multiplies; others are padded with zeros.
RANK_STEP = 16
#: The most ranks of a cohort's runs that are stacked; of more, a tile of rows takes the ranks of its own runs alone.
#: Stacked, 2 and 4 runs of rank 32 cost 9 and 22 % of a step of 512 rows (H200, 7B); the other way cost 59 and 67 %,
#: since its warps read x again, outside the pipeline. By operations 256 ranks would cost 16 %.
MOST_STACKED_RANKS = 256
#: A layer is large if each thread block has at least this many of its stages.
_LARGE_LAYER_STAGES = 6


@dataclass(frozen=True)
class KernelVariant:
    """The kernel, compiled for up to 8 * `x_tiles` rows of x.

    The pipeline's `stages` bound the bytes in flight. `registers` is the limit per thread, for up to 32 rows. With
    `one_per_sm`, each thread block requests enough shared memory that two of a launch never share a multiprocessor.
    `cluster`: thread blocks of a worker; two share what they copy of x, and each has other rows of W.
    `row_blocks` of x are what it is meant for; the last variant takes any number.
    """

    x_tiles: int
    stages: int
    registers: int = 0
    one_per_sm: bool = False
    cluster: int = 1
    row_blocks: int = 1

    @property
    def rows(self) -> int:
        """Rows of x that a thread block multiplies."""
        return 8 * self.x_tiles

    @property
    def many_rows(self) -> bool:
        """Whether it is the kernel in clusters, for more than 128 rows of a row block."""
        return self.cluster > 1

    @property
    def columns(self) -> int:
        """Columns of W and x in a stage."""
        return 256 if self.x_tiles <= 8 else 128

    @property
    def small_batch(self) -> bool:
        """Whether separate warps compute A x (up to 32 rows). With more rows, A x uses stages of the pipeline."""
        return self.x_tiles <= 4

    @property
    def shrink_warps(self) -> int:
        """Warps that compute A x or add its sums; one if two thread blocks may share a multiprocessor."""
        return 1 if self.x_tiles <= 2 else 3

    def shared_bytes(self, ranks: int) -> int:
        """Dynamic shared memory of a thread block in bytes; A x has `ranks` columns.

        It contains the stages, 1,024 bytes to align the first, up to 16 rows the sums that warps exchange, and up to 32
        rows A x.
        """
        stage = layouts.BLOCK_BYTES * self.columns // layouts.BLOCK_COLUMNS + self.rows * 2 * self.columns
        exchanged = 512 * self.rows if self.x_tiles <= 2 else 0
        shrunk = 2 * self.rows * ranks if self.small_batch else 0
        return max(self.stages * stage + 1024 + exchanged + shrunk, ONE_PER_SM_BYTES if self.one_per_sm else 0)

    def workers(self, blocks: int, most: int) -> int:
        """Workers that share `blocks` of W of a row block; `most` thread blocks of it fit onto the GPU."""
        # Beyond 32 rows, stages of A replace some of W's. Half as many workers as blocks leave each at least one.
        return min(most // self.cluster, blocks if self.small_batch else max(blocks // 2, 1))

    def blocks(self, rows: int, columns: int) -> int:
        """Blocks of W [rows, columns] that workers divide."""
        return -(-rows // (layouts.BLOCK_ROWS * self.cluster)) * (columns // self.columns)

    def shrink_split(
        self, columns: int, ranks: int, workers: int, processors: int, by_runs: bool = False
    ) -> tuple[int, int]:
        """The division of A x over `columns` columns of x: senders of sums per 16 rows of A, and blocks per span.

        The number of senders is an upper bound. A span is in blocks of columns, and 0 where stages divide A: beyond 32
        rows, except by runs, where a warp multiplies 8 rows at a time.
        """
        if self.small_batch or by_runs:
            blocks = columns // layouts.BLOCK_COLUMNS
            warps, tiles = self.shrink_warps * processors, ranks // RANK_STEP * (self.x_tiles if by_runs else 1)
            most = min(max(warps // max(tiles, 1), _SPANS[0]), _SPANS[1])
            span = -(-blocks // most)
            return -(-blocks // span), span
        blocks = columns // self.columns
        units = -(-ranks // (SHRINK_ROWS * self.cluster)) * blocks
        units_each = max(1, units // workers)
        return 2 * min(blocks, blocks // units_each + 2), 0

    def threads(self, rank: int) -> int:
        """Threads per block: eight warps that multiply, one that copies, the warps of A x, and maybe an idle warp."""
        return 32 * (8 + 1 + self.shrink_warps + self._has_idle_warp(rank))

    def registers_per_thread(self, rank: int) -> int:
        """The limit of registers per thread."""
        # Without adapters fewer suffice, and an idle warp separates thread blocks.
        return 96 if self._has_idle_warp(rank) else self.registers

    def _has_idle_warp(self, rank: int) -> bool:
        return self.small_batch and not self.one_per_sm and not rank


#: Beyond 32 rows small layers have row blocks of 32 or 64. Each reads W again, from the L2 cache: the exchange of sums
#: and of A x takes more of their time than W does.
_UP_TO_32 = KernelVariant(4, stages=3, registers=168, one_per_sm=True)
_UP_TO_64 = KernelVariant(8, stages=4)
#: Variants by rows of x, each for small and for large layers. The last variant also computes more rows, in row blocks.
#: Up to 16 rows, a thread block of a small and one of a large layer share a multiprocessor, so that the next layer's
#: weights are copied while this one ends. Two of the same size don't: small layers' lack memory, large ones' registers.
#: Beyond 64 rows, padding costs as much as rows do, so there are many variants (their times: docs/lab/kernels.md).
VARIANTS = (
    (
        KernelVariant(1, stages=4, registers=96, one_per_sm=True),
        KernelVariant(1, stages=4, registers=104),
    ),
    (
        KernelVariant(2, stages=4, registers=96, one_per_sm=True),
        KernelVariant(2, stages=3, registers=104),
    ),
    (_UP_TO_32,) * 2,
    (replace(_UP_TO_32, row_blocks=2), _UP_TO_64),
    (replace(_UP_TO_32, row_blocks=3), KernelVariant(12, stages=6)),
    (replace(_UP_TO_32, row_blocks=4), KernelVariant(16, stages=5)),
    (KernelVariant(20, stages=4, cluster=2),) * 2,
    (replace(_UP_TO_64, row_blocks=3), KernelVariant(24, stages=3, cluster=2)),
    (replace(_UP_TO_64, row_blocks=4), KernelVariant(28, stages=3, cluster=2)),
    (replace(_UP_TO_64, row_blocks=4), KernelVariant(32, stages=3, cluster=2)),
    (KernelVariant(20, stages=4, cluster=2, row_blocks=2),) * 2,
    (KernelVariant(24, stages=3, cluster=2, row_blocks=2),) * 2,
    (KernelVariant(28, stages=3, cluster=2, row_blocks=2),) * 2,
    (KernelVariant(32, stages=3, cluster=2, row_blocks=2),) * 2,
)
#: The most rows of x in a row block.
MOST_ROWS = VARIANTS[-1][0].rows


def _variants_for(rows: int) -> tuple[KernelVariant, KernelVariant]:
    """The variants for `rows` rows of x, for a small and for a large layer. Both have room for them."""
    return next((pair for pair in VARIANTS if rows <= pair[1].rows * pair[1].row_blocks), VARIANTS[-1])


def limits(rows: int) -> list[int]:
    """The most rows of x of each variant that serves up to `rows` rows."""
    ends = [large.rows * large.row_blocks for _, large in VARIANTS]
    return [end for begin, end in zip([0, *ends], ends, strict=False) if begin < rows]


def padded_rows(rows: int) -> int:
    """The most rows of x with as many products as `rows`: whole row blocks of a large layer's variant."""
    block = _variants_for(rows)[1].rows
    return -(-rows // block) * block


def variant_for(rows: int, layer_rows: int, columns: int, processors: int) -> tuple[KernelVariant, int]:
    """The variant for `rows` rows of x and a layer [layer_rows, columns], and its number of blocks of W."""
    small, large = _variants_for(rows)
    variant = large if small.blocks(layer_rows, columns) >= _LARGE_LAYER_STAGES * processors else small
    return variant, variant.blocks(layer_rows, columns)


# Launches of the decode product: out = W x + b + B (A x).

_NAMES = ("instructions.cu", "tile_scheduler.cu", "pipeline.cu", "lora.cu", "epilogue.cu", "many_rows.cu", "kernel.cu")
_SOURCES = tuple(Path(__file__).with_name(name) for name in _NAMES)
_ENTRY = "w4a16"
#: The word in the memory for sums until a sum arrives, as in the kernel's source.
_EMPTY = -1
#: The fewest thread blocks that share a row block of x. Further row blocks need another launch: 2,048 rows on an H200.
LEAST_WORKERS = 16
_POINTER = ctypes.c_void_p
_Params = params_struct(
    x_map=ctypes.c_uint8 * 128,
    a_map=ctypes.c_uint8 * 128,
    out_map=ctypes.c_uint8 * 128,
    weights=_POINTER,
    x=_POINTER,
    out=_POINTER,
    bias=_POINTER,
    lora_a=_POINTER,
    lora_b=_POINTER * 3,
    shrunk=_POINTER,
    sums=_POINTER,
    shrink_sums=_POINTER,
    counters=_POINTER,
    factor=ctypes.c_float * 3,
    lora_factor=_POINTER,
    runs=_POINTER,
    gate=ctypes.c_float * 2,
    part_end=ctypes.c_int * 3,
    **dict.fromkeys(
        (
            "m",
            "rows",
            "columns",
            "parts",
            "mode",
            "scale_multiplier",
            "scale_offset",
            "row_blocks",
            "senders",
            "span",
            "run_count",
        ),
        ctypes.c_int,
    ),
    arrived=_POINTER,
)


class Mode(IntEnum):
    """The epilogue's use of the product, with the numbers of the kernel's source."""

    PLAIN = 0
    #: Adds the product to `out`.
    RESIDUAL = 1
    #: out = activation(gate) * up.
    GATED = 2


class RunsOfRows(IntEnum):
    """Whether rows of x have adapters of several runs, and how, with the numbers of the kernel's source."""

    ONE_RUN = 0
    STACKED = 1
    BY_RUNS = 2


@dataclass(frozen=True)
class Operands:
    """Weights of layers with the same input, with their biases and adapters."""

    tiles: Tiles
    bias: Tensor | None  # [rows] float32, in the order of the tiles
    down: Tensor  # A of each layer and run, [layers, runs * rank, columns] bfloat16; rank is a multiple of RANK_STEP
    ups: Sequence[Tensor]  # B of each layer, [rows, runs * rank] bfloat16, finite if runs are stacked
    scales: Tensor  # [layers * runs] float32, of each adapter
    runs: RowRuns | None = None  # of a cohort

    @property
    def rank(self) -> int:
        """Rank of a layer's adapter, padded: of all runs if they are stacked, else of each."""
        return self.down.shape[1] // (self.run_count if self.cohort is RunsOfRows.BY_RUNS else 1)

    @property
    def ranks(self) -> int:
        """Columns of A x, the sum of all layers' ranks."""
        return len(self.tiles.parts) * self.rank

    @property
    def run_count(self) -> int:
        """The number of runs."""
        return self.runs.count if self.runs else 1

    @property
    def cohort(self) -> RunsOfRows:
        """Whether rows of x have adapters of several runs, and how."""
        if self.runs is None or not self.down.shape[1]:
            return RunsOfRows.ONE_RUN
        return RunsOfRows.STACKED if self.down.shape[1] <= MOST_STACKED_RANKS else RunsOfRows.BY_RUNS


def multiply(operands: Operands, x: Tensor, out: Tensor, mode: Mode, activation: Activation = "silu") -> None:
    """Write the product with x [m, columns] to out [m, rows], with GATED [m, rows / 2], both bfloat16 and contiguous.

    `activation` is that of GATED.
    """
    tiles, processors = operands.tiles, workspace(x.device).processors
    most = processors // LEAST_WORKERS * MOST_ROWS
    for number, (rows, outs) in enumerate(zip(x.split(most), out.split(most), strict=True)):
        variant, blocks = variant_for(len(rows), tiles.rows, tiles.columns, processors)
        row_blocks = -(-len(rows) // variant.rows)
        workers = variant.workers(blocks, processors // row_blocks)
        params = _params(operands, rows, outs, number * most, mode, activation, variant, row_blocks, workers)
        shared_bytes = variant.shared_bytes(operands.ranks)
        kernel = _SOURCES, _ENTRY, _options(variant, operands), shared_bytes, x.get_device()
        launch(kernel, workers * row_blocks * variant.cluster, variant.threads(operands.rank), params)


def _options(variant: KernelVariant, operands: Operands) -> tuple[tuple[str, int], ...]:
    return (
        ("X_TILES", variant.x_tiles),
        ("STAGES", variant.stages),
        ("REGISTERS", variant.registers_per_thread(operands.rank)),
        ("RANK", operands.rank),
        ("CLUSTER", variant.cluster),
        ("COHORT", operands.cohort),
    )


def _params(
    operands: Operands,
    x: Tensor,
    out: Tensor,
    first: int,
    mode: Mode,
    activation: Activation,
    variant: KernelVariant,
    row_blocks: int,
    workers: int,
) -> ctypes.Structure:
    tiles, parts, space = operands.tiles, len(operands.tiles.parts), workspace(x.device)
    width = operands.ranks
    by_runs = operands.cohort is RunsOfRows.BY_RUNS
    senders, span = variant.shrink_split(tiles.columns, width, workers, space.processors, by_runs)
    multiplier, offset = tiles.scale_decode
    x_map = tensor_map(x, variant.rows // variant.cluster, variant.columns // variant.cluster)
    staged = operands.rank and not variant.small_batch and not by_runs
    ends = [sum(tiles.parts[: i + 1]) for i in range(parts)]
    return _Params(
        x_map=x_map,
        out_map=flat_tensor_map(out, variant.rows) if variant.many_rows else x_map,
        a_map=tensor_map(operands.down.flatten(0, 1), SHRINK_ROWS, variant.columns) if staged else x_map,
        weights=address(tiles.data),
        x=address(x),
        out=address(out),
        bias=address(operands.bias),
        lora_a=address(operands.down),
        lora_b=(_POINTER * 3)(*map(address, operands.ups)),
        shrunk=address(space.get("shrunk", row_blocks * variant.rows // 2 * width)),
        sums=address(_sums(space, variant)),
        shrink_sums=address(space.get("shrink_sums", row_blocks * width * senders * variant.rows, _EMPTY)),
        counters=address(space.get("counters", 2 * row_blocks)),
        factor=(ctypes.c_float * 3)(*tiles.factors),
        lora_factor=address(operands.scales),
        runs=address(None if operands.runs is None else operands.runs.rows[first : first + len(x)]),
        gate=(ctypes.c_float * 2)(*(-log2(e) * one for one in COEFFICIENTS[activation])),
        part_end=(ctypes.c_int * 3)(*(ends + [tiles.rows] * 3)[:3]),
        m=len(x),
        rows=tiles.rows,
        columns=tiles.columns,
        parts=parts,
        mode=mode,
        scale_multiplier=multiplier,
        scale_offset=offset - (1 << 32) if offset >= 1 << 31 else offset,
        row_blocks=row_blocks,
        senders=senders,
        span=span,
        run_count=operands.run_count,
        arrived=address(space.get("arrived", space.processors)),
    )


def _sums(space: Workspace, variant: KernelVariant) -> Tensor:
    rows = max(each.rows for pair in VARIANTS for each in pair if each.many_rows == variant.many_rows)
    count = space.processors * layouts.BLOCK_ROWS * rows
    return space.get("staged_sums", count) if variant.many_rows else space.get("sums", 2 * count, _EMPTY)


# Kernels that unpack tiles or words to bfloat16 weights, for cuBLAS products in training.

_UNPACK_SOURCE = Path(__file__).with_name("unpack.cu")
_UnpackParams = params_struct(
    weights=ctypes.c_void_p,
    out=ctypes.c_void_p,
    divisor=ctypes.c_float,
    **dict.fromkeys(
        (
            "first_tile",
            "tiles",
            "column_blocks",
            "interleaved",
            "scale_multiplier",
            "scale_offset",
        ),
        ctypes.c_int,
    ),
)


def dense(tiles: Tiles | Words, part: int) -> Tensor:
    """The weight of a layer, bfloat16 [rows, columns], bit for bit equal to that of `formats.dequantize`."""
    if isinstance(tiles, Words):
        from qerl.kernels.triton.linear import dense as dense_of_words

        return dense_of_words(tiles, part, torch.bfloat16)
    out = tiles.data.new_empty(tiles.parts[part], tiles.columns, dtype=torch.bfloat16)
    multiplier, offset = tiles.scale_decode
    row_tiles = (tiles.rows if tiles.interleaved else tiles.parts[part]) // 16
    column_blocks = tiles.columns // layouts.BLOCK_COLUMNS
    params = _UnpackParams(
        weights=address(tiles.data),
        out=address(out),
        divisor=tiles.divisors[part],
        first_tile=0 if tiles.interleaved else sum(tiles.parts[:part]) // 16,
        tiles=row_tiles,
        column_blocks=column_blocks,
        interleaved=part if tiles.interleaved else -1,
        scale_multiplier=multiplier,
        scale_offset=offset & 0xFFFF,
    )
    launch(((_UNPACK_SOURCE,), "unpack", (), 0, out.get_device()), -(-row_tiles * column_blocks // 8), 256, params)
    return out
