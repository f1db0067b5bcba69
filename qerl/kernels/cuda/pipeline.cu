// The pipeline of stages in shared memory: the warps that read it and the thread that fills it. Also a tile of W.

// The stage that a multiplying warp reads. Addresses in shared memory are counted up: computing them anew for each stage took
// 14 % of the time at 32 rows of x.
struct PipelineState {
    u32 address, barriers, number, phase;
    u32 other;  // with many rows, how far away the barriers of the cluster's other thread block are

    // `barriers`: [2][STAGES], that a stage is full and that it is empty; with many rows the same again for its second half.
    __device__ __forceinline__ PipelineState(u8* stages, u64* barriers)
        : address(kept_uniform(shared_address(stages))),
          barriers(kept_uniform(shared_address(barriers))),
          number(0),
          phase(0),
          other(MANY_ROWS ? of_other(shared_address(barriers)) - shared_address(barriers) : 0) {}
    __device__ __forceinline__ void wait() const { barrier_wait(barriers, phase); }
    __device__ __forceinline__ void wait_for_second_half() const { barrier_wait(barriers + SECOND_HALF, phase); }
    // The barrier of the stage that counts the warps that have read it.
    __device__ __forceinline__ u32 empty() const { return barriers + 8 * STAGES; }
    __device__ __forceinline__ void advance() {
        address += STAGE_BYTES, barriers += 8;
        if (++number == STAGES) number = 0, address -= STAGES * STAGE_BYTES, barriers -= 8 * STAGES, phase ^= 1;
    }
    // Called when all lanes have read the stage; goes on to the next one.
    __device__ __forceinline__ void release(int lane) {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty());
        if (MANY_ROWS) barrier_arrive_remote_if(empty() + other, lane == 0);
        if (MANY_ROWS) leave_if(empty() + SECOND_HALF, lane, true);
        advance();
    }
    // Arrives at an `empty` barrier of all that copy into the stage, by a predicate.
    __device__ __forceinline__ void leave_if(u32 empty, int lane, bool condition) const {
        barrier_arrive_if(empty, condition && lane == 0);
        if (MANY_ROWS) barrier_arrive_remote_if(empty + other, condition && lane == 0);
    }
};

// --- copies ---

__device__ __forceinline__ void copy_weights(const Params& p, int unit, u8* stage, u64* full) {
    barrier_expect(full, STAGE_BYTES);
    bulk_copy(stage, p.weights + (size_t)unit * WEIGHT_BYTES, WEIGHT_BYTES, full);
}

__device__ __forceinline__ void copy_shrink(const Params& p, const StageIterator& at, u8* stage, u64* full) {
    barrier_expect(full, STAGE_COLUMNS / 64 * (SHRINK_PART_BYTES + X_PART_BYTES));
    tensor_copy(stage, &p.a_map, at.column * STAGE_COLUMNS, at.row * SHRINK_ROWS, full);
}

__device__ __forceinline__ void copy_shrunk(const Params& p, const Share& share, const StageIterator& at, u8* stage, u64* full) {
    const Expansion expansion(p, at.row);
    const int first = (at.expansion - 1) * EXPAND_TILES, tiles = min(expansion.tiles - first, EXPAND_TILES);
    const size_t tile = (size_t)share.row_block * p.parts * RANK_TILES + expansion.first + first;
    const u8* from = (const u8*)p.shrunk + tile * EXPAND_TILE_BYTES;
    barrier_expect(full, tiles * EXPAND_TILE_BYTES);
    bulk_copy(stage + WEIGHT_BYTES, from, tiles * EXPAND_TILE_BYTES, full);
}

// Fills the stages; run by one thread.
__device__ void copy(const Params& p, const Share& share, u8* stages, u64* full, u64* shrunk) {
    u64* empty = full + STAGES;
    const auto copy_constants = [&](const StageIterator& at, int stage) {
        u8* to = stages + stage * STAGE_BYTES;
        if (at.i < share.shrinks)
            copy_shrink(p, at, to, full + stage);
        else
            copy_weights(p, share.unit(at.i), to, full + stage);
    };
    int early = 0;
    for (StageIterator at(share); early < STAGES && at.i < share.stages() && !at.expansion; early++, at.advance(p, share))
        copy_constants(at, early);
    asm volatile("prefetch.tensormap [%0];" ::"l"(&p.x_map) : "memory");
    wait_for_earlier_kernels();
    int stage = 0, round = 0;
    for (StageIterator at(share); at.i < share.stages(); at.advance(p, share)) {
        if (round) barrier_wait(empty + stage, (round - 1) & 1);
        if (at.expansion) {
            barrier_wait(shrunk, 0);
            asm volatile("fence.proxy.async;" ::: "memory");
            copy_shrunk(p, share, at, stages + stage * STAGE_BYTES, full + stage);
        } else {
            if (round || stage >= early) copy_constants(at, stage);
            u8* x = stages + stage * STAGE_BYTES + WEIGHT_BYTES;
            tensor_copy(x, &p.x_map, at.column * STAGE_COLUMNS, share.row_block * ROWS, full + stage);
        }
        if (++stage == STAGES) stage = 0, round++;
    }
}

// A tile's rows in their layers, and the operands of the epilogue that don't depend on the sums.
struct Tile {
    int row, low_part, high_part;  // with GATED a tile has 8 rows of gate and then 8 of up, otherwise all are of one part
    const u16 *b_low, *b_high;     // of B, at this lane's place
    float low_bias, high_bias;

    __device__ Tile(const Params& p, int row, int lane) : row(row) {
        const int g = lane / 4;
        low_part = p.mode == GATED ? 0 : part_of(p, row), high_part = p.mode == GATED ? 1 : low_part;
        const int in_part = p.mode == GATED ? row / 2 : row - (low_part ? p.part_end[low_part - 1] : 0);
        const int ranks = COHORT == BY_RUNS ? p.run_count * RANK : RANK;
        b_low = p.lora_b[low_part] + (size_t)(in_part + g) * ranks;
        b_high = p.lora_b[high_part] + (size_t)(in_part + g + (p.mode == GATED ? 0 : 8)) * ranks;
        const bool biased = p.bias && row < p.rows;
        low_bias = biased ? p.bias[row + g] : 0, high_bias = biased ? p.bias[row + g + 8] : 0;
    }

    // Prefetches its part of B into L2.
    __device__ __forceinline__ void prefetch_b(const Params& p, int lane) const {
        if (row >= p.rows) return;
        for (int column = lane % 4 * 64; column < RANK; column += 256) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(b_low + column));
            asm volatile("prefetch.global.L2 [%0];" ::"l"(b_high + column));
        }
    }
    // The same for the runs of a cohort that begin the tiles of rows of x, from row `first` on.
    __device__ __forceinline__ void prefetch_b_of_runs(const Params& p, int first, int lane) const {
        if (row >= p.rows) return;
        for (int n = lane % 4; n < X_TILES; n += 4) {
            const int begin = p.runs[min(first + n * 8, p.m - 1)] * RANK;
            for (int column = begin; column < begin + RANK; column += 64) {
                asm volatile("prefetch.global.L2 [%0];" ::"l"(b_low + column));
                asm volatile("prefetch.global.L2 [%0];" ::"l"(b_high + column));
            }
        }
    }
};
