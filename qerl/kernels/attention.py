"""A decode step's attention in Triton; `qerl.kernels.reference` has the PyTorch version.

A head is read in two halves whose elements rotate in pairs. Where only some elements rotate, the others make up the
rest of both halves, and the cache has keys in this order.

A program computes the query heads of one KV head, over one or two whole sequences (`whole_attention`), or over some
pages of one where there are few (`split_attention`). A head's sink is added to the sum of its weights in the end, and
its results are multiplied by the sigmoid of its gate, if it has one. The
program with the new token rotates its key and appends it to the cache. Rows of one sequence, which verify drafts,
attend to each other's tokens, so a launch before appends all of them. A sequence's result depends on that sequence and
on the batch size, not on other sequences, unless these have infinite or undefined values in the cache.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.attention_parts import Cache, HeadNorms, Rope, Sequences, Shape, SplitSums
from qerl.kernels.cache_pages import append
from qerl.kernels.decode_state import DecodeState
from qerl.kernels.geometry import PAGE, Heads, splits_of
from qerl.kernels.kv_cache import KVCache
from qerl.kernels.launch import dependent, let_next_start, wait_for_earlier
from qerl.kernels.split_attention import attend_split, combine
from qerl.kernels.token_heads import angles
from qerl.kernels.whole_attention import attend_whole

#: Programs per multiprocessor at which each attends to a whole sequence; half of the multiprocessors may then be idle.
_LEAST_PROGRAMS = 0.5
#: Programs per multiprocessor that must be left where each attends to two sequences.
_LEAST_SHARED_PROGRAMS = 6.5
#: Query heads of a KV head to which a program attends: the least size of a matrix product.
_MEMBERS = 16
#: Numbers of pages in shared memory: one being attended to, others being copied.
_PAGES = (3, 2)
#: The gain in speed where one more program runs on a multiprocessor at once.
_WORTH_OF_A_PROGRAM = 0.25
#: Bytes of shared memory for all else; GPUs such as the RTX 4090 have 99 KiB in all.
_OTHER_BYTES = 8 * 1024
#: A split has one page in shared memory: most splits have one page, and the next product needs the rest of the memory
#: for the weights that it copies.
_SPLIT_PAGES = 1


@triton.jit
def _append_all(qkv, cache, sequences, rope, norms, shape: tl.constexpr, PDL: tl.constexpr):
    row, head = tl.program_id(0), tl.program_id(1)
    let_next_start(PDL)
    slot = tl.load(sequences.rows + row)
    position = tl.load(sequences.position + slot)
    wait_for_earlier(PDL)
    if position >= 0:
        c, s = angles(rope.cos, rope.sin, position, tl.arange(0, shape.half_block), shape.dim, shape.rotary)
        token = qkv + row * shape.width
        pages = sequences.pages + slot * sequences.pages_stride
        append(token, cache, pages, head, position, c, s, norms, shape, True)


def _rows_together(heads: Heads, batch: int, multiprocessors: int) -> int:
    """The rows to which one program attends, when it attends to whole sequences: one or two."""
    fits = 2 * heads.query <= _MEMBERS * heads.kv and batch % 2 == 0 and heads.window is None
    return 2 if fits and batch * heads.kv >= 2 * _LEAST_SHARED_PROGRAMS * multiprocessors else 1


def _pages_ahead(programs: float, page: int, other: int, shared: int) -> int:
    """Pages in shared memory of each of so many `programs` per multiprocessor.

    A page, what else a program has there, and the `shared` memory of a multiprocessor are in bytes. Fewer pages leave
    room for more programs, but the multiprocessors should also be full in the last turn.
    """

    def worth(pages: int) -> float:
        at_once = max(1, shared // (pages * page + other))
        turns = programs / at_once
        return turns / ceil(turns) * (1 + _WORTH_OF_A_PROGRAM * at_once)

    return max(_PAGES, key=worth)


def _shape(
    heads: Heads, cache: KVCache, rope: tuple[Tensor, Tensor], batch: int, table: int, splits: int, drafted: bool
) -> Shape:
    """The kernel's sizes. `splits` becomes 1 if there are enough sequences, and slots have `table` pages."""
    if heads.window is not None:
        splits = min(splits, splits_of((heads.window - 2) // PAGE + 2))  # of the most pages in which a window lies
    gpu: Any = torch.cuda.get_device_properties(cache.data.device)
    if batch * heads.kv >= _LEAST_PROGRAMS * gpu.multi_processor_count:
        splits = 1
    dim_block, group = triton.next_power_of_2(heads.dim), heads.query // heads.kv
    rows = _rows_together(heads, batch, gpu.multi_processor_count) if splits == 1 else 1
    page, other = 2 * PAGE * dim_block * cache.data.element_size(), _OTHER_BYTES
    if cache.scales is not None:  # a page from FP8 is there in the dtype of queries, too
        other += page * rope[0].element_size()
    pages = _SPLIT_PAGES
    if splits == 1:
        programs = batch * heads.kv / rows / gpu.multi_processor_count
        pages = _pages_ahead(programs, page, other, gpu.shared_memory_per_multiprocessor)
    fitting = max(0, gpu.shared_memory_per_block_optin - other) // page
    # Triton's pipeline has two stages for a page: its number and the page itself.
    stages = 2 * min(fitting, pages) + 1
    return Shape(
        query=heads.query,
        kv=heads.kv,
        group=group,
        rows=rows,
        members=max(_MEMBERS, triton.next_power_of_2(rows * group)),
        dim=heads.dim,
        pitch=heads.pitch,
        keys=heads.query * heads.pitch,
        width=heads.width,
        dim_block=max(16, dim_block),
        half_block=max(16, dim_block // 2),
        page=PAGE,
        table=triton.next_power_of_2(table) if rows > 1 else 0,
        splits=splits,
        stages=stages,
        normed=heads.q_norm is not None,
        norm_offset=heads.norm_offset,
        sinks=heads.sinks is not None,
        rotary=2 * rope[0].shape[1],
        window=heads.window or 0,
        rounded=cache.scales is not None,
        appends=not drafted,
        early=splits > 1 and not drafted,
    )


def attend(
    qkv: Tensor,
    cache: KVCache,
    state: DecodeState,
    rows: Tensor,
    rope: tuple[Tensor, Tensor],
    heads: Heads,
    splits: int,
    drafted: bool = False,
) -> Tensor:
    """See `reference.attend`; `splits` is `geometry.splits_of` the most pages of a sequence."""
    batch, device = len(rows), qkv.device
    shape = _shape(heads, cache, rope, batch, state.pages.shape[1], splits, drafted)
    out = qkv.new_empty(batch, heads.query * heads.dim)
    sequences = Sequences(rows, state.position, state.pages, state.pages.stride(0))
    # Placeholders, which aren't read without norms and sinks.
    q_norm, k_norm, sinks = (qkv if one is None else one for one in (heads.q_norm, heads.k_norm, heads.sinks))
    scale = heads.scale * 1.4426950408889634  # scores are in units of log2
    parts = Cache(cache.data, cache.data if cache.scales is None else cache.scales)
    tables, norms, pdl = Rope(*rope), HeadNorms(q_norm, k_norm, heads.eps), dependent(device)
    if drafted:
        _append_all[(batch, heads.kv)](qkv, parts, sequences, tables, norms, shape=shape, num_warps=4, **pdl)
    if shape.splits == 1:
        attend_whole[(batch // shape.rows, heads.kv)](
            qkv, parts, out, sequences, tables, norms, sinks, scale, shape=shape, num_warps=4, **pdl
        )
        return out
    summed = torch.empty(batch, heads.query, shape.splits, heads.dim, dtype=torch.float32, device=device)
    sums = SplitSums(summed, *torch.empty(2, batch, heads.query, shape.splits, dtype=torch.float32, device=device))
    attend_split[(batch, heads.kv, shape.splits)](
        qkv, parts, sequences, tables, norms, sums, scale, shape=shape, num_warps=4, **pdl
    )
    combine[(batch, heads.query)](qkv, rows, state.position, sinks, sums, out, shape=shape, num_warps=1, **pdl)
    return out
