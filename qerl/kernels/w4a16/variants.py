"""How the decode product's kernel is compiled, by the rows of x and the size of the layer."""

from __future__ import annotations

from dataclasses import dataclass

from qerl.formats import tiles as layout

#: Shared memory with which two thread blocks of a launch don't fit onto a multiprocessor. Without it, where a norm's
#: block takes the place of one, two end up on another multiprocessor, and all wait for them: 28 % of a step at one
#: sequence.
ONE_PER_SM_BYTES = 116000
#: Rows of A in a stage of the pipeline, beyond 32 rows of x.
SHRINK_ROWS = 32
#: Up to 32 rows of x, A x is cut into at least and at most so many spans of columns, by how many rows A has.
_SPANS = (8, 40)
#: A layer is large if each thread block has at least so many stages of it.
_LARGE_LAYER_STAGES = 6


@dataclass(frozen=True)
class KernelVariant:
    """The kernel, compiled for up to 8 * `x_tiles` rows of x.

    `stages` of the pipeline bound the bytes in flight. `registers` is the limit of a thread, up to 32 rows.
    `one_per_sm`: two thread blocks of a launch never share a multiprocessor; each asks for more memory than it needs.
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
        """Whether it is the kernel for more than 256 rows."""
        return self.cluster > 1

    @property
    def columns(self) -> int:
        """Columns of W and x in a stage."""
        return 256 if self.x_tiles <= 8 else 128

    @property
    def small_batch(self) -> bool:
        """Whether warps of their own compute A x (up to 32 rows). Beyond, A x takes stages of the pipeline."""
        return self.x_tiles <= 4

    @property
    def shrink_warps(self) -> int:
        """Warps that compute A x or add up its sums; one where two thread blocks share a multiprocessor."""
        return 1 if self.x_tiles <= 2 else 3

    def shared_bytes(self, lora_columns: int) -> int:
        """Dynamic shared memory of a thread block; A x has `lora_columns` columns.

        It holds the stages, 1,024 bytes to align the first, up to 16 rows sums that warps exchange, and up to 32 A x.
        """
        stage = layout.BLOCK_BYTES * self.columns // layout.BLOCK_COLUMNS + self.rows * 2 * self.columns
        exchanged = 512 * self.rows if self.x_tiles <= 2 else 0
        shrunk = 2 * self.rows * lora_columns if self.small_batch else 0
        return max(self.stages * stage + 1024 + exchanged + shrunk, ONE_PER_SM_BYTES if self.one_per_sm else 0)

    def workers(self, blocks: int, most: int) -> int:
        """Workers that share `blocks` of W of a row block; `most` thread blocks of it fit onto the GPU.

        Beyond 32 rows, stages of A replace some of W's. Half as many workers as blocks leave each at least one.
        """
        return min(most // self.cluster, blocks if self.small_batch else max(blocks // 2, 1))

    def blocks(self, rows: int, columns: int) -> int:
        """Blocks of W [rows, columns] that workers divide."""
        return -(-rows // (layout.BLOCK_ROWS * self.cluster)) * (columns // self.columns)

    def shrink_split(self, columns: int, lora_columns: int, workers: int, processors: int) -> tuple[int, int]:
        """How A x of `columns` columns of x is divided: the senders of sums of 16 rows of A, and the blocks of a span.

        `senders` is an upper bound. A span counts in blocks of columns; it is 0 beyond 32 rows, where stages divide A.
        """
        if self.small_batch:
            blocks = columns // layout.BLOCK_COLUMNS
            warps = self.shrink_warps * processors
            most = min(max(warps // max(lora_columns // 16, 1), _SPANS[0]), _SPANS[1])
            span = -(-blocks // most)
            return -(-blocks // span), span
        blocks = columns // self.columns
        units = -(-lora_columns // (SHRINK_ROWS * self.cluster)) * blocks
        units_each = max(1, units // workers)
        return 2 * min(blocks, blocks // units_each + 2), 0

    def threads(self, rank: int) -> int:
        """Threads of a block: eight warps that multiply, one that copies, those for A x, and maybe an idle one."""
        return 32 * (8 + 1 + self.shrink_warps + self._has_idle_warp(rank))

    def registers_per_thread(self, rank: int) -> int:
        """The limit of registers; without adapters fewer do, and an idle warp keeps two thread blocks apart."""
        return 96 if self._has_idle_warp(rank) else self.registers

    def _has_idle_warp(self, rank: int) -> bool:
        return self.small_batch and not self.one_per_sm and not rank


#: By rows of x, for small and for large layers; the last serves any number of rows, in row blocks of its own height.
#: Up to 16 rows, a thread block of a small layer and one of a large layer share a multiprocessor, so that the next
#: layer's weights are copied while this one ends. Two of a kind don't: memory keeps small layers' apart, registers
#: large ones'. Up to 384 rows, two row blocks of 192 are fewer products than two of 256.
VARIANTS = (
    (
        KernelVariant(1, stages=4, registers=96, one_per_sm=True),
        KernelVariant(1, stages=4, registers=104),
    ),
    (
        KernelVariant(2, stages=4, registers=96, one_per_sm=True),
        KernelVariant(2, stages=3, registers=104),
    ),
    (KernelVariant(4, stages=3, registers=168, one_per_sm=True),) * 2,
    (KernelVariant(8, stages=4),) * 2,
    (KernelVariant(16, stages=5),) * 2,
    (KernelVariant(32, stages=3),) * 2,
    (KernelVariant(24, stages=3, cluster=2, row_blocks=2),) * 2,
    (KernelVariant(32, stages=3, cluster=2, row_blocks=2),) * 2,
)
#: Rows of x that one row block has at most.
MOST_ROWS = VARIANTS[-1][0].rows


def variant_for(rows: int, layer_rows: int, columns: int, processors: int) -> tuple[KernelVariant, int]:
    """The variant for `rows` rows of x and a layer [layer_rows, columns], and the blocks of W that it divides."""
    small, large = next((pair for pair in VARIANTS if rows <= pair[0].rows * pair[0].row_blocks), VARIANTS[-1])
    blocks = small.blocks(layer_rows, columns)
    return (large if blocks >= _LARGE_LAYER_STAGES * processors else small), blocks
