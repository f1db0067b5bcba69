"""Launches of the decode product: out = W x + b + B (A x)."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import e, log2
from pathlib import Path

import torch
from torch import Tensor

from qerl.formats import tiles as layout
from qerl.formats.tiles import Tiles
from qerl.kernels.activations import COEFFICIENTS, Activation
from qerl.kernels.jit import address, compile_all, defines, flat_tensor_map, launch, load, params_struct, tensor_map
from qerl.kernels.w4a16.variants import MOST_ROWS, SHRINK_ROWS, VARIANTS, KernelVariant, limits, variant_for
from qerl.kernels.workspace import Workspace, workspace

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
    lora_factor=ctypes.c_float * 3,
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


@dataclass(frozen=True)
class Operands:
    """Weights of layers with the same input, with their biases and adapters."""

    tiles: Tiles
    bias: Tensor | None  # [rows] float32, in the order of the tiles
    lora_a: Tensor  # [layers, rank, columns] bfloat16; rank is 0 or a multiple of 16
    lora_b: Sequence[Tensor]  # of each layer, [rows, rank] bfloat16
    lora_scales: tuple[float, ...]  # of each layer

    @property
    def rank(self) -> int:
        """Rank of the adapters, padded."""
        return self.lora_a.shape[1]

    @property
    def lora_columns(self) -> int:
        """Columns of A x, the sum of all layers' ranks."""
        return len(self.tiles.parts) * self.rank


def multiply(operands: Operands, x: Tensor, out: Tensor, mode: Mode, activation: Activation = "silu") -> None:
    """Write the product with x [m, columns] to out [m, rows], with GATED [m, rows / 2], both bfloat16 and contiguous.

    `activation` is that of GATED.
    """
    most = workspace(x.device).processors // LEAST_WORKERS * MOST_ROWS
    for rows, outs in zip(x.split(most), out.split(most), strict=True):
        _launch(operands, rows, outs, mode, activation)


def compile_ahead(products: Iterable[Operands], rows: int) -> None:
    """Compile the variants for up to `rows` rows of x at the same time; a launch compiles one that is missing."""
    kinds: dict[torch.device, set[tuple[tuple[str, int], ...]]] = defaultdict(set)
    for operands in products:
        tiles, device = operands.tiles, operands.tiles.data.device
        for count in limits(rows):
            variant, _ = variant_for(count, tiles.rows, tiles.columns, workspace(device).processors)
            kinds[device].add(_options(variant, operands.rank))
    for device, options in kinds.items():
        compile_all(_SOURCES, _ENTRY, options, device.index)


def _options(variant: KernelVariant, rank: int) -> tuple[tuple[str, int], ...]:
    return defines(
        X_TILES=variant.x_tiles,
        STAGES=variant.stages,
        REGISTERS=variant.registers_per_thread(rank),
        RANK=rank,
        CLUSTER=variant.cluster,
    )


def _launch(operands: Operands, x: Tensor, out: Tensor, mode: Mode, activation: Activation) -> None:
    tiles, processors = operands.tiles, workspace(x.device).processors
    variant, blocks = variant_for(len(x), tiles.rows, tiles.columns, processors)
    row_blocks = -(-len(x) // variant.rows)
    workers = variant.workers(blocks, processors // row_blocks)
    params = _params(operands, x, out, mode, activation, variant, row_blocks, workers)
    shared_bytes = variant.shared_bytes(operands.lora_columns)
    function = load(_SOURCES, _ENTRY, _options(variant, operands.rank), shared_bytes, x.get_device())
    launch(function, workers * row_blocks * variant.cluster, variant.threads(operands.rank), shared_bytes, params)


def _params(
    operands: Operands,
    x: Tensor,
    out: Tensor,
    mode: Mode,
    activation: Activation,
    variant: KernelVariant,
    row_blocks: int,
    workers: int,
) -> ctypes.Structure:
    tiles, parts, space = operands.tiles, len(operands.tiles.parts), workspace(x.device)
    width = operands.lora_columns
    senders, span = variant.shrink_split(tiles.columns, width, workers, space.processors)
    multiplier, offset = tiles.scale_decode
    x_map = tensor_map(x, variant.rows // variant.cluster, variant.columns // variant.cluster)
    staged = operands.rank and not variant.small_batch
    ends = [sum(tiles.parts[: i + 1]) for i in range(parts)]
    return _Params(
        x_map=x_map,
        out_map=flat_tensor_map(out, variant.rows) if variant.many_rows else x_map,
        a_map=tensor_map(operands.lora_a.flatten(0, 1), SHRINK_ROWS, variant.columns) if staged else x_map,
        weights=address(tiles.data),
        x=address(x),
        out=address(out),
        bias=address(operands.bias),
        lora_a=address(operands.lora_a),
        lora_b=(_POINTER * 3)(*(address(b) for b in operands.lora_b)),
        shrunk=address(space.get("shrunk", row_blocks * variant.rows // 2 * width)),
        sums=address(_sums(space, variant)),
        shrink_sums=address(space.get("shrink_sums", row_blocks * width * senders * variant.rows, _EMPTY)),
        counters=address(space.get("counters", 2 * row_blocks)),
        factor=(ctypes.c_float * 3)(*tiles.factors),
        lora_factor=(ctypes.c_float * 3)(*operands.lora_scales),
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
        arrived=address(space.get("arrived", space.processors)),
    )


def _sums(space: Workspace, variant: KernelVariant) -> Tensor:
    rows = max(each.rows for pair in VARIANTS for each in pair if each.many_rows == variant.many_rows)
    count = space.processors * layout.BLOCK_ROWS * rows
    return space.get("staged_sums", count) if variant.many_rows else space.get("sums", 2 * count, _EMPTY)
