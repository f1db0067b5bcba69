// Beyond 128 rows of x. What differs from fewer rows:
//
// Clusters: the two thread blocks of a worker have half of each of its rows of blocks, 128 rows of W. Each copies 64 of a stage's 128
// columns of x, for both: x is most of what is copied, and L2 is read half as often. The halves of a stage have barriers of their
// own, so that 64 columns can be copied while the others are multiplied: memory has room for three stages.
//
// Sums: the worker that begins a row of blocks adds up the sums of those who have the rest. They leave theirs in global memory and
// go on; they reach the adder as stages, copied while it multiplies. Each thread block leaves sums at most once, of its first row.
//
// Output: rows are finished in a stage, to which a residual has been copied, and are copied to `out` from there.

// --- copies ---

// Fills the stages; run by one thread.
struct ManyRowsCopier {
    const Params& p;
    const Share& share;
    u8* stages;
    u64 *full, *shrunk;
    int x_bytes;  // of 64 columns of x. Its second half of rows isn't copied where there is none: zeros take longer to come.
    int stage = 0, round = 0, early = 0;

    __device__ __forceinline__ ManyRowsCopier(const Params& p, const Share& share, u8* stages, u64* full, u64* shrunk)
        : p(p), share(share), stages(stages), full(full), shrunk(shrunk) {
        x_bytes = share.row_block * ROWS + ROWS / 2 < p.m ? X_PART_BYTES : X_PART_BYTES / 2;
    }
    __device__ __forceinline__ u8* memory() const { return stages + stage * STAGE_BYTES; }
    __device__ __forceinline__ u64* ready(int half = 0) const { return full + stage + half * 2 * STAGES; }
    __device__ __forceinline__ int block_row(int row) const { return row * CLUSTER + share.rank; }
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, round++;
    }
    __device__ __forceinline__ void wait_until_empty(int half) const {
        if (round) barrier_wait(ready(half) + STAGES, (round - 1) & 1);
    }
    // A stage that isn't copied in halves.
    __device__ __forceinline__ void begin_whole() const {
        wait_until_empty(0), wait_until_empty(1);
        barrier_arrive(ready(1));
    }

    // W or A, and the bytes that the first half of the stage or all of it waits for.
    __device__ __forceinline__ void copy_constants(const StageIterator& at) const {
        if (at.i < share.shrinks) {
            barrier_expect(ready(), STAGE_COLUMNS / 64 * (SHRINK_PART_BYTES + x_bytes));
            tensor_copy(memory(), &p.a_map, at.column * STAGE_COLUMNS, block_row(at.row) * SHRINK_ROWS, ready());
            return;
        }
        // A thread block behind the last row multiplies that row again, and what comes out is dropped.
        const size_t block = (size_t)min(block_row(at.row), (p.rows - 1) / BLOCK_ROWS) * share.column_blocks + at.column;
        barrier_expect(ready(), WEIGHT_BYTES + x_bytes);
        bulk_copy(memory(), p.weights + block * WEIGHT_BYTES, WEIGHT_BYTES, ready());
    }
    __device__ __forceinline__ void copy_x(const StageIterator& at, int half, u64* ready) const {
        if (share.rank != half) return;
        for (int row = 0; row * 128 < x_bytes; row += ROWS / 2)
            tensor_copy_to_both(memory() + WEIGHT_BYTES + half * X_PART_BYTES + row * 128, &p.x_map,
                                at.column * STAGE_COLUMNS + half * 64, share.row_block * ROWS + row, ready);
    }
    __device__ __forceinline__ void copy_unit(const StageIterator& at) const {
        const bool halves = at.i >= share.shrinks;
        if (halves)
            wait_until_empty(0);
        else
            begin_whole();
        if (round || stage >= early) copy_constants(at);
        copy_x(at, 0, ready());
        if (halves) {
            wait_until_empty(1);
            barrier_expect(ready(1), x_bytes);
        }
        copy_x(at, 1, ready(halves));
    }
    // Where rows are finished. With a residual it begins with what `out` holds.
    __device__ __forceinline__ void copy_out(int row) const {
        begin_whole();
        if (p.mode != RESIDUAL) return barrier_arrive(ready());
        barrier_expect(ready(), BLOCK_ROWS / 64 * X_PART_BYTES);
        for (int part = 0; part < BLOCK_ROWS / 64; part++)
            tile_copy(memory() + WEIGHT_BYTES + part * X_PART_BYTES, &p.out_map, block_row(row) * BLOCK_ROWS + part * 64,
                      share.row_block * ROWS, ready());
    }
    // What the other parts of a divided row of blocks left, in their order.
    __device__ __forceinline__ void copy_sums(const RowSplit& split) {
        for (int i = 1; i < split.count; i++) {
            int* arrived = split.arrived(p, i);
            while (load_acquire(arrived) == 0) {}
            *arrived = 0;
            asm volatile("fence.proxy.async;" ::: "memory");
            for (int part = 0; part < SUM_STAGES; part++, advance()) {
                begin_whole();
                barrier_expect(ready(), SUM_STAGE_BYTES);
                bulk_copy(memory(), (const u8*)split.sums(p, i) + part * SUM_STAGE_BYTES, SUM_STAGE_BYTES, ready());
            }
        }
    }

    __device__ __forceinline__ void run() {
        for (StageIterator at(share); early < STAGES && at.i < share.stages() && !at.expansion; at.advance(p, share), stage++)
            copy_constants(at), early++;
        stage = 0;
        asm volatile("prefetch.tensormap [%0];" ::"l"(&p.x_map) : "memory");
        wait_for_earlier_kernels();
        for (StageIterator at(share); at.i < share.stages(); at.advance(p, share), advance()) {
            if (!at.expansion) {
                copy_unit(at);
            } else if (at.expansion > Expansion(p, at.row).stages()) {
                copy_out(at.row);
            } else {
                begin_whole();
                barrier_wait(shrunk, 0);
                asm volatile("fence.proxy.async;" ::: "memory");
                copy_shrunk(p, share, at, memory(), ready());
            }
        }
        const RowSplit split(p, share);
        if (split.me > 0 || split.count == 1) return;
        copy_sums(split);
        copy_out((share.last - 1) / share.column_blocks);
    }
};

// Says that the sums of this thread block's first row of blocks are there, if another began it; run by one thread. The fence would
// hold up the warps that multiply.
__device__ void announce_sums(const Params& p, const Share& share, u64* sent) {
    if (share.first % share.column_blocks == 0) return;
    barrier_wait(sent, 0);
    add_release(p.arrived + blockIdx.x, 1);
}

// --- epilogue ---

// The epilogue for a lane of a warp that has a tile of the row of blocks.
struct ManyRowsEpilogue {
    const Params& p;
    const Share& share;
    const RowSplit& split;
    const Tile& tile;
    u64* sent;        // counts the warps that have left their sums
    int place, lane;  // the lane's place among those of all tiles, and in its warp

    // Returns the barrier of the stage from which the rows are still copied to `out`, or 0.
    __device__ __forceinline__ u32 run(PipelineState& at, float4 c[X_TILES]) const {
        if (split.me > 0) {
            uint4* mine = split.sums(p, split.me) + place;
#pragma unroll
            for (int n = 0; n < X_TILES; n++) send(mine + n * BLOCK_TILES * 32, c[n]);
            __syncwarp();
            if (lane == 0) barrier_arrive(sent);
            return 0;
        }
        for (int i = 1; i < split.count; i++) add_sums(at, c);
        at.wait();
        const u32 rows = at.address + WEIGHT_BYTES, empty = at.empty();
        if (p.mode == GATED)
            write_gated(rows, c);
        else
            write(rows, c);
        show_to_copies();
        asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
        if (place == 0) copy_to_out(rows);
        __syncwarp();
        at.advance();
        return empty;
    }

    // Adds those of one other worker.
    __device__ __forceinline__ void add_sums(PipelineState& at, float4 c[X_TILES]) const {
#pragma unroll
        for (int part = 0; part < SUM_STAGES; part++) {
            at.wait();
#pragma unroll
            for (int n = 0; n < X_TILES / SUM_STAGES; n++) {
                const uint4 sum = load_shared(at.address + n * BLOCK_TILES * 512 + place * 16);
                float4& to = c[part * (X_TILES / SUM_STAGES) + n];
                to.x += __uint_as_float(sum.x), to.y += __uint_as_float(sum.y);
                to.z += __uint_as_float(sum.z), to.w += __uint_as_float(sum.w);
            }
            at.release(lane);
        }
    }

    // Writes the tile's columns of all rows, as `out_map` has them.
    __device__ __forceinline__ void write(u32 rows, const float4 c[X_TILES]) const {
        const int warp = place / 32, chunk = warp % 4 * 2 + lane / 8 % 2;
        u32 to = rows + warp / 4 * X_PART_BYTES + (lane / 16 * 8 + lane % 8) * 128 + (chunk ^ lane % 8) * 16;
#pragma unroll
        for (int n = 0; n < X_TILES; n += 2, to += 2048) {
            u32 pairs[4], before[4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float4& sum = c[n + i];
                pairs[2 * i] = to_bf16x2(sum.x + tile.low_bias, sum.y + tile.low_bias);
                pairs[2 * i + 1] = to_bf16x2(sum.z + tile.high_bias, sum.w + tile.high_bias);
            }
            if (p.mode == RESIDUAL) {
                load_transposed(before, to);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u32 a = pairs[i], b = before[i];
                    pairs[i] = to_bf16x2(low_float(a) + low_float(b), high_float(a) + high_float(b));
                }
            }
            store_transposed(to, pairs);
        }
    }

    // The same for the gate's activation times up, 8 columns.
    __device__ __forceinline__ void write_gated(u32 rows, const float4 c[X_TILES]) const {
        u32 to = rows + lane * 128 + (place / 32 ^ lane % 8) * 16;
#pragma unroll
        for (int n = 0; n < X_TILES; n += 4, to += 4096) {
            u32 pairs[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float4& sum = c[n + i];
                const float even = gated(p, sum.x + tile.low_bias, sum.z + tile.high_bias);
                pairs[i] = to_bf16x2(even, gated(p, sum.y + tile.low_bias, sum.w + tile.high_bias));
            }
            store_transposed(to, pairs);
        }
    }

    // Run by the first thread, which has the first tile.
    __device__ __forceinline__ void copy_to_out(u32 rows) const {
        const int first = p.mode == GATED ? tile.row / 2 : tile.row, parts = p.mode == GATED ? 1 : BLOCK_ROWS / 64;
        for (int part = 0; part < parts; part++)
            tile_store(rows + part * X_PART_BYTES, &p.out_map, first + part * 64, share.row_block * ROWS);
        commit_stores();
    }
};
