"""Operands of the portable products, and how these are divided among programs: by rows of x and by layer size.

The choice depends on nothing measured at run time, so that equal inputs give equal bits in every run on a kind of GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from qerl.formats.layouts import Words
from qerl.kernels.state import RowRuns

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
        """The number of parts of W's columns, of which `blocks` blocks exist."""
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


@dataclass(frozen=True)
class GradientTile:
    """The rows of W that a program of a grouped input gradient reads at a time, its warps and pipeline stages."""

    n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class WeightGradientTile:
    """The part of an expert's gradient that a program sums, its warps and pipeline stages."""

    n: int  # rows
    columns: int
    warps: int
    stages: int


#: Of grouped products, by the pairs of a block; `m` are those of a strip. They are the fastest, or nearly so, of those
#: timed with the shapes of Qwen3-30B-A3B and gpt-oss-20b on an H200 (docs/lab/mixtures.md). For strips of 8 pairs the
#: compiler takes mma.sync on Hopper, too. There is no product for Hopper alone: one was built and was slower, and this
#: one takes at most 1.12 times as long as a copy of the experts' weights at 8 and 32 tokens.
_GROUPED = {
    8: Tile(128, 8, 4, 4),
    16: Tile(128, 8, 4, 4),
    32: Tile(128, 8, 4, 3),
    64: Tile(128, 8, 4, 3),
    128: Tile(128, 128, 8, 3),
}
_GRADIENT = GradientTile(64, 4, 3)


def grouped_tile_for(pairs: int, itemsize: int = 2) -> Tile:
    """The tile of a grouped product whose blocks have this many pairs.

    `itemsize` is that of x: float32 takes twice the shared memory, so that it has small tiles and no pipeline.
    """
    tile = _GROUPED[pairs]
    return tile if itemsize == 2 else replace(tile, n=min(tile.n, 64), stages=1)


def gradient_tile_for(pairs: int, itemsize: int = 2) -> GradientTile:
    """The tile of a grouped input gradient whose blocks have this many pairs; `itemsize` is that of the gradient."""
    # Sums and operands in float32 of 128 pairs take more registers than four warps have.
    return _GRADIENT if itemsize == 2 else replace(_GRADIENT, warps=max(_GRADIENT.warps, pairs // 16), stages=1)


def weight_gradient_tile_for(rows: int, columns: int, pairs: int, itemsize: int = 2) -> WeightGradientTile:
    """The tile of a grouped gradient [rows, columns] of an expert's adapter, by blocks of so many pairs.

    One of both sizes is a rank. `itemsize` is that of the activations. Not timed on a GPU yet.
    """
    n, wide = (min(max(1 << (size - 1).bit_length(), 16), 64) for size in (rows, columns))
    return WeightGradientTile(n, wide, 4, 2 if itemsize == 2 and pairs < 128 else 1)
