"""The division of work among the decode product's thread blocks, by the kernel's own source compiled for the CPU."""

import ctypes
import random
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from qerl.kernels.cuda import w4a16
from qerl.kernels.cuda.w4a16 import ONE_PER_SM_BYTES, SHRINK_ROWS, VARIANTS, RunsOfRows

COMPILER = shutil.which("c++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

BY_NAME = {
    f"{each.x_tiles} in clusters of {each.cluster}, {each.stages} stages, {each.row_blocks} row blocks": each
    for pair in VARIANTS
    for each in pair
}
RANKS = (0, 16, 64, 128, 256)
BLOCK_ROWS, EXPAND_TILES = 128, 8
PLAIN, GATED = 0, 2

PRELUDE = """
#include <algorithm>
#include <cstddef>
using std::max;
using std::min;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
struct TensorMap { u8 bytes[128]; };
struct uint4 { u32 x, y, z, w; };
struct { int x; } blockIdx, gridDim;
#define __device__
#define __forceinline__ inline
"""
# Shape: rows, columns, parts, mode, the parts' ends, row blocks and thread blocks of each.
PART = """
#define X_TILES {x_tiles}
#define RANK {rank}
#define STAGES {stages}
#define CLUSTER {cluster}
#define COHORT {cohort}
namespace tiles{x_tiles}_rank{rank}_stages{stages}_cluster{cluster}_cohort{cohort} {{
#include "{source}"
}}
extern "C" void sizes_{x_tiles}_{rank}_{stages}_{cluster}_{cohort}(int* out) {{
    using namespace tiles{x_tiles}_rank{rank}_stages{stages}_cluster{cluster}_cohort{cohort};
    int sizes[] = {{STAGE_COLUMNS, LOCAL, ROWS, 32 * (WARPS + 1 + SHRINK_WARPS), CHUNKS}};
    std::copy(sizes, sizes + 5, out);
}}
extern "C" int share_{x_tiles}_{rank}_{stages}_{cluster}_{cohort}(
    const int* shape, int worker, int* out, int* stages) {{
    using namespace tiles{x_tiles}_rank{rank}_stages{stages}_cluster{cluster}_cohort{cohort};
    Params p{{}};
    p.rows = shape[0], p.columns = shape[1], p.parts = shape[2], p.mode = shape[3];
    std::copy(shape + 4, shape + 7, p.part_end);
    p.row_blocks = shape[7], gridDim.x = shape[7] * shape[8] * CLUSTER, blockIdx.x = worker * shape[7] * CLUSTER;
    const Share share(p);
    const RowSplit of_last(p, share);
    const int units[] = {{share.first_shrink, share.shrinks, share.first, share.last}};
    const int ends[] = {{of_last.me, of_last.count, of_last.owners}};
    std::copy(ends, ends + 3, std::copy(units, units + 4, out));
    for (int chunk = 0; chunk < CHUNKS; chunk++) out[7 + chunk] = of_last.owner(chunk);
    int count = 0;
    for (StageIterator at(share); at.i < share.stages(); at.advance(p, share), count++) {{
        const int stage[] = {{at.i < share.shrinks, at.row, at.column, at.expansion}};
        std::copy(stage, stage + 4, stages + 4 * count);
    }}
    return count;
}}
#undef X_TILES
#undef RANK
#undef STAGES
#undef CLUSTER
#undef COHORT
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scheduler")
    source = Path(w4a16.__file__).with_name("tile_scheduler.cu")
    kinds = [(rank, 0) for rank in RANKS] + [(rank, int(RunsOfRows.BY_RUNS)) for rank in RANKS if rank]
    compiled = {
        (v.x_tiles, rank, v.stages, v.cluster, cohort) for pair in VARIANTS for v in pair for rank, cohort in kinds
    }
    parts = [
        PART.format(x_tiles=x_tiles, rank=rank, stages=stages, cluster=cluster, cohort=cohort, source=source)
        for x_tiles, rank, stages, cluster, cohort in sorted(compiled)
    ]
    (folder / "scheduler.cpp").write_text(PRELUDE + "".join(parts))
    target = folder / "scheduler.so"
    command = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", target, folder / "scheduler.cpp"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(target))


@dataclass
class Work:
    """The work of one thread block."""

    shrinks: range
    units: range
    me: int
    count: int
    owners: int
    chunk_owners: list[int]
    stages: list[tuple[int, ...]]  # whether of A, row, column, number of the stage of A x


def works(library, variant, rank, ends, columns, mode, processors, row_blocks=1, cohort=False):
    """The work of all thread blocks of a row block of x, and the number of blocks in a row of blocks of W."""
    rows, of_row = ends[-1], columns // variant.columns
    blocks = variant.blocks(rows, columns)
    workers = variant.workers(blocks, processors // row_blocks)
    shape = [rows, columns, len(ends), mode, *(ends + [rows] * 3)[:3], row_blocks, workers]
    given = (ctypes.c_int * 9)(*shape)
    kind = RunsOfRows.BY_RUNS * cohort
    function = getattr(library, f"share_{variant.x_tiles}_{rank}_{variant.stages}_{variant.cluster}_{kind}")
    chunks = sizes_of(library, variant, rank)[4]
    found = []
    for worker in range(workers):
        out, stages = (ctypes.c_int * 64)(), (ctypes.c_int * (4 * (blocks + 1000)))()
        count = function(given, worker, out, stages)
        first_shrink, shrinks, first, last, me, members, owners = out[:7]
        listed = [tuple(stages[4 * i : 4 * i + 4]) for i in range(count)]
        of_a = range(first_shrink, first_shrink + shrinks)
        found.append(Work(of_a, range(first, last), me, members, owners, out[7 : 7 + chunks], listed))
    return found, of_row


def sizes_of(library, variant, rank):
    out = (ctypes.c_int * 5)()
    getattr(library, f"sizes_{variant.x_tiles}_{rank}_{variant.stages}_{variant.cluster}_0")(out)
    return list(out)


def parts_of(variant, row, ends, mode):
    if mode == GATED:
        return 2
    span = BLOCK_ROWS * variant.cluster
    first, last = row * span, min((row + 1) * span, ends[-1]) - 1
    return sum(end > first and begin <= last for begin, end in zip([0, *ends], ends, strict=False))


def expected_stages(work, variant, rank, ends, mode, of_row, cohort):
    stages = [(1, unit // of_row, unit % of_row, 0) for unit in work.shrinks]
    for unit in work.units:
        row, column = divmod(unit, of_row)
        stages.append((0, row, column, 0))
        ends_here = column == of_row - 1 or unit == work.units[-1]
        if not variant.small_batch and ends_here and row * of_row in work.units:
            count = 0 if cohort else -(-parts_of(variant, row, ends, mode) * rank // 16 // EXPAND_TILES)
            # In clusters a row that one worker has is finished in a stage of its own.
            count += variant.cluster > 1 and column == of_row - 1
            stages += [(0, row, column, number + 1) for number in range(count)]
    return stages


def check(library, variant, rank, ends, columns, mode, processors, row_blocks=1, cohort=False):
    found, of_row = works(library, variant, rank, ends, columns, mode, processors, row_blocks, cohort)
    # Each unit once, in the thread blocks' order, and at least one for each.
    assert [unit for work in found for unit in work.units] == list(range(variant.blocks(ends[-1], columns)))
    assert all(work.units for work in found)
    by_warps = variant.small_batch or cohort
    rows_of_a = 0 if by_warps else -(-len(ends) * rank // (SHRINK_ROWS * variant.cluster))
    assert [unit for work in found for unit in work.shrinks] == list(range(rows_of_a * of_row))
    for number, work in enumerate(found):
        row = work.units[-1] // of_row
        members = [i for i, one in enumerate(found) if one.units[0] // of_row <= row <= one.units[-1] // of_row]
        alone = len(work.chunk_owners) == 1 or variant.cluster > 1
        owners = [members[0]] if alone else [i for i in members if found[i].units[-1] // of_row == row]
        assert (work.me, work.count, work.owners) == (members.index(number), len(members), len(owners))
        # Those who own parts of a row have nothing to do behind it.
        assert work.chunk_owners == sorted(work.chunk_owners)
        assert set(work.chunk_owners) <= set(range(len(owners)))
        assert work.stages == expected_stages(work, variant, rank, ends, mode, of_row, cohort)
    return found, of_row


#: Ends of the layers' rows, columns and mode of products of 7B and 32B, and the smallest.
LAYERS = [
    *(([3584, 4096, 4608], 3584, PLAIN), ([18944, 37888], 3584, GATED), ([3584], 18944, PLAIN)),
    *(([5120, 6144, 7168], 5120, PLAIN), ([256], 512, PLAIN), ([128], 256, PLAIN)),
]


def shapes_of(variant):
    """Ends, columns and mode of published models' layers and of random ones, processors and the adapters' rank."""
    yield from ((*layer, 132, rank) for layer in LAYERS for rank in (16, 128))
    chance = random.Random(variant.x_tiles)
    for _ in range(60):
        ends = [128 * chance.randint(1, 30)]
        mode = chance.choice((PLAIN, GATED))
        if mode == GATED:
            ends.append(2 * ends[0])
        else:
            ends += [ends[0] + 128 * chance.randint(1, 10) * n for n in range(1, chance.randint(1, 3))]
        processors = chance.choice((132, 114, 7, variant.cluster))
        yield ends, 256 * chance.randint(1, 20), mode, processors, chance.choice(RANKS)


@pytest.mark.parametrize("name", BY_NAME)
def test_everybody_has_work_all_of_it_is_done_once_and_sums_have_a_place_for_every_sender(library, name):
    variant = BY_NAME[name]
    for ends, columns, mode, processors, rank in shapes_of(variant):
        for row_blocks in sorted({1, variant.row_blocks}) if processors > 7 else [1]:
            if rank:
                check(library, variant, rank, ends, columns, mode, processors, row_blocks, cohort=True)
            found, of_row = check(library, variant, rank, ends, columns, mode, processors, row_blocks)
            if variant.small_batch or not rank:
                continue
            places, _ = variant.shrink_split(columns, len(ends) * rank, len(found), processors)
            for row in range(-(-len(ends) * rank // (SHRINK_ROWS * variant.cluster))):
                senders = [i for i, work in enumerate(found) if any(unit // of_row == row for unit in work.shrinks)]
                assert 2 * (senders[-1] - senders[0] + 1) <= places


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("variant", dict.fromkeys(v for pair in VARIANTS for v in pair))
def test_sizes_are_those_of_the_kernel(library, variant, rank):
    columns, local, rows, threads, _ = sizes_of(library, variant, rank)
    width = 3 * rank
    needed = local + 1024 + (2 * rows * width if variant.small_batch else 0)
    assert variant.columns == columns
    idle = variant.small_batch and not variant.one_per_sm and not rank  # a warp that keeps two thread blocks apart
    assert variant.threads(rank) == threads + 32 * idle
    assert variant.shared_bytes(width) == max(needed, ONE_PER_SM_BYTES if variant.one_per_sm else 0)
