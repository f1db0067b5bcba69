// The adapter: A x (shrink) and B (A x) (expand).
//
// In a cohort a row of x takes the rows of A and columns of B of its own run. Stacked, A x has the ranks of all runs, and is 0 where
// they aren't the row's. By runs, A x has RANK columns of each part whatever the number of runs, and a tile of 8 rows takes the
// work of the runs that it has: of one, where rows lie run by run.

// The runs that a tile of 8 rows of x has, one after another. All lanes of a warp call it.
struct TileRuns {
    int own;    // of row lane / 4; behind the last row of x it is that row's
    u32 left;   // lanes of rows whose run is still to come
    u32 lanes;  // of the present run's rows

    __device__ __forceinline__ void begin(const Params& p, int first, int lane) {
        own = p.runs[min(first + lane / 4, p.m - 1)], left = ~0u;
    }
    __device__ __forceinline__ int next() {
        const int run = __shfl_sync(~0u, own, __ffs(left) - 1);
        lanes = __ballot_sync(~0u, own == run);
        left &= ~lanes;
        return run;
    }
    // Takes sums of the present run's rows, which are 2t (x, z) and 2t + 1 (y, w). Another run's may be NaN.
    __device__ __forceinline__ void take(float4& to, const float4& from, int lane) const {
        const u32 rows = lanes >> lane % 4 * 8;
        if (rows & 1) to.x = from.x, to.z = from.z;
        if (rows & 16) to.y = from.y, to.w = from.w;
    }
};

// --- A x ---

// The place of a thread block's sums for a tile of 16 rows of A.
__device__ __forceinline__ uint4* shrink_sums(const Params& p, const Share& share, int tile, int sender) {
    const int tiles = p.parts * RANK_TILES;
    return p.shrink_sums + (((size_t)share.row_block * tiles + tile) * p.senders + sender) * X_TILES * 32;
}

// 16 rows and 128 columns of A. Lane t of a quad has eight columns of each 32, in place of those that the operand's
// definition gives it: the sum is over the same columns, and loads are of 16 bytes.
struct ShrinkOperand {
    uint4 rows[2][4];  // of A: g and g + 8

    __device__ __forceinline__ void load(const Params& p, int tile, int column) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                rows[r][k] = *(const uint4*)(p.lora_a + (size_t)(tile * 16 + g + 8 * r) * p.columns + column + k * 32 + t * 8);
    }

    // Prefetches 16 rows of two times 128 bytes into L2.
    static __device__ __forceinline__ void prefetch(const Params& p, int tile, int column, int lane) {
        const u16* line = p.lora_a + (size_t)(tile * 16 + lane / 2) * p.columns + column + lane % 2 * 64;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
    }

    template <int COUNT>
    __device__ __forceinline__ void multiply(const Params& p, int x_row, int column, float4 c[COUNT]) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            const u16* x = p.x + (size_t)min(x_row + n * 8 + g, p.m - 1) * p.columns + column + t * 8;
            uint4 b[4];
#pragma unroll
            for (int k = 0; k < 4; k++) b[k] = load_once((const uint4*)(x + k * 32));
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const u32 first[4] = {rows[0][k].x, rows[1][k].x, rows[0][k].y, rows[1][k].y};
                const u32 second[4] = {rows[0][k].z, rows[1][k].z, rows[0][k].w, rows[1][k].w};
                multiply_add(c[n], first, b[k].x, b[k].y);
                multiply_add(c[n], second, b[k].z, b[k].w);
            }
        }
    }
};

// Up to 32 rows of x: a warp takes 16 rows of A and a span of columns at a time.
__device__ void shrink_by_warps(const Params& p, const Share& share, int number, int lane) {
    const int blocks = p.columns / BLOCK_COLUMNS, items = p.parts * RANK_TILES * p.senders;
    const int first = number * share.workers + share.worker;
    ShrinkOperand a;
    if (first < items) {
        const int tile = first / p.senders, begin = first % p.senders * p.span;
        a.load(p, tile, begin * BLOCK_COLUMNS);
        for (int block = begin + 1; block < min(begin + p.span, blocks); block++)
            ShrinkOperand::prefetch(p, tile, block * BLOCK_COLUMNS, lane);
    }
    wait_for_earlier_kernels();
    for (int item = first; item < items; item += SHRINK_WARPS * share.workers) {
        const int tile = item / p.senders, sender = item % p.senders;
        const int begin = sender * p.span, end = min(begin + p.span, blocks);
        float4 c[X_TILES] = {};
        for (int block = begin; block < end; block++) {
            if (item != first || block != begin) a.load(p, tile, block * BLOCK_COLUMNS);
            a.multiply<X_TILES>(p, share.row_block * ROWS, block * BLOCK_COLUMNS, c);
        }
        uint4* sums = shrink_sums(p, share, tile, sender);
#pragma unroll
        for (int n = 0; n < X_TILES; n++) send(sums + n * 32 + lane, c[n]);
    }
}

// The rows of a cohort: a warp takes a tile of x, 16 rows of A of each of its runs and a span of columns at a time.
__device__ void shrink_by_runs(const Params& p, const Share& share, int number, int lane) {
    const int blocks = p.columns / BLOCK_COLUMNS, items = p.parts * RANK_TILES * X_TILES * p.senders;
    const int workers = share.workers * CLUSTER, first = (number * share.workers + share.worker) * CLUSTER + share.rank;
    const auto x_row_of = [&](int item) { return share.row_block * ROWS + item / p.senders % X_TILES * 8; };
    const auto tile_of = [&](int item) { return item / p.senders / X_TILES; };
    const auto tile_of_a = [&](int tile, int run) {
        return (tile / max(RANK_TILES, 1) * p.run_count + run) * RANK_TILES + tile % max(RANK_TILES, 1);
    };
    if (first < items) {
        // A hint, as earlier kernels may still write the runs.
        const int run = min((u32)load_acquire(p.runs + min(x_row_of(first), p.m - 1)), (u32)p.run_count - 1);
        const int begin = first % p.senders * p.span;
        for (int block = begin; block < min(begin + p.span, blocks); block++)
            ShrinkOperand::prefetch(p, tile_of_a(tile_of(first), run), block * BLOCK_COLUMNS, lane);
    }
    wait_for_earlier_kernels();
    for (int item = first; item < items; item += SHRINK_WARPS * workers) {
        const int sender = item % p.senders, tile = tile_of(item), x_row = x_row_of(item);
        const int begin = sender * p.span, end = min(begin + p.span, blocks);
        TileRuns runs;
        runs.begin(p, x_row, lane);
        float4 sum = {0, 0, 0, 0};
        while (runs.left) {
            const int tile_of_run = tile_of_a(tile, runs.next());
            float4 c[1] = {};
            for (int block = begin; block < end; block++) {
                ShrinkOperand a;
                a.load(p, tile_of_run, block * BLOCK_COLUMNS);
                a.multiply<1>(p, x_row, block * BLOCK_COLUMNS, c);
            }
            runs.take(sum, c[0], lane);
        }
        send(shrink_sums(p, share, tile, sender) + item / p.senders % X_TILES * 32 + lane, sum);
    }
}

// Beyond 32 rows of x: a stage of A x. Each group of four warps takes half of the columns. It reads 64 rows of A, of
// which those behind SHRINK_ROWS are other data; their sums are dropped.
__device__ __forceinline__ void shrink_stage(u32 stage, int warp, float4 c[X_TILES]) {
    constexpr int PARTS = STAGE_COLUMNS / 64 / 2;
    const u64 a = matrix_descriptor(stage + warp / 4 * PARTS * SHRINK_PART_BYTES);
    const u64 x = matrix_descriptor(stage + WEIGHT_BYTES + warp / 4 * PARTS * X_PART_BYTES);
    begin_products();
#pragma unroll
    for (int k = 0; k < PARTS * 4; k++)
        multiply_add_both_shared(c, a + (k / 4 * SHRINK_PART_BYTES + k % 4 * 32) / 16,
                                 x + (k / 4 * X_PART_BYTES + k % 4 * 32) / 16);
    commit_products();
    wait_for_products<0>();
}

// Sends the sums of a thread block's stages of 32 rows of A; `row` counts those.
__device__ __forceinline__ void leave_shrink_sums(const Params& p, const Share& share, int row, int warp, int lane,
                                                  const float4 c[X_TILES]) {
    const ShrinkUnits units(p, share.workers);
    const int tile = (row * CLUSTER + share.rank) * (SHRINK_ROWS / 16) + warp % 4;
    const int sender = share.worker - units.sender(row * share.column_blocks);
    if (warp % 4 >= SHRINK_ROWS / 16 || tile >= p.parts * RANK_TILES) return;
    uint4* sums = shrink_sums(p, share, tile, 2 * sender + warp / 4) + lane;
#pragma unroll
    for (int n = 0; n < X_TILES; n++) send(sums + n * 32, c[n]);
}

// Where A x of a row of this row block and of row `a` of a tile of A goes: tiles behind each other, rows of 32 bytes.
// With many rows of x they lie as products read them: halves swapped in every other four rows, columns in the order of
// `LoraOperand`.
__device__ __forceinline__ u16* shrunk_place(const Params& p, const Share& share, int row, int tile, int a) {
    const int half = a / 2 % 2 ^ row / 4 % 2;
    u16* block = p.shrunk + (size_t)share.row_block * ROWS * p.parts * RANK + tile * ROWS * 16 + row * 16;
    return block + (SHRINK_BY_WARPS ? a : half * 8 + a / 4 * 2 + a % 2);
}

// Senders whose sums the lanes of a warp read at the same time: as many as fit into registers.
constexpr int SENDER_GROUPS = SMALL_BATCH || RANK_TILES <= 2 ? 4 : 2, SENDERS_AT_A_TIME = SENDER_GROUPS == 4 ? 10 : 8;
constexpr int SUM_LANES = 32 / SENDER_GROUPS;

// What a row's A x of 16 ranks is multiplied by: the adapter's scale, or in a cohort 0 at the ranks of another run.
struct RowScale {
    float factor;
    bool own;

    __device__ __forceinline__ RowScale(const Params& p, const Share& share, int tile, int row) {
        const int of_row = COHORT ? p.runs[min(share.row_block * ROWS + row, p.m - 1)] : 0;
        const int run = COHORT == STACKED ? tile % max(RANK_TILES, 1) * p.run_count / max(RANK_TILES, 1) : of_row;
        factor = p.lora_factor[tile / max(RANK_TILES, 1) * p.run_count + run], own = run == of_row;
    }
    // Another run's sums may be NaN.
    __device__ __forceinline__ u32 scaled(float low, float high) const {
        return own ? to_bf16x2(low * factor, high * factor) : 0;
    }
};

// Adds up A x in the senders' order. All warps that add up share out the sums.
__device__ __forceinline__ void share_sums(const Params& p, const Share& share, int number, int lane) {
    const ShrinkUnits units(p, share.workers);
    const int group = lane / SUM_LANES, g = lane % SUM_LANES;
    const int blocks = share.workers * CLUSTER, block = share.worker * CLUSTER + share.rank;
    for (int item = number * blocks + block; item < p.parts * RANK_TILES * X_TILES * SENDER_GROUPS;
         item += SHRINK_WARPS * blocks) {
        const int tile = item / SENDER_GROUPS / X_TILES, n = item / SENDER_GROUPS % X_TILES;
        const int place = item % SENDER_GROUPS * SUM_LANES + g;  // the lane whose sums these are
        int senders = p.senders;
        if constexpr (!SHRINK_BY_WARPS) {
            const int unit = tile / (SHRINK_ROWS * CLUSTER / 16) * share.column_blocks;
            senders = 2 * (units.sender(unit + share.column_blocks - 1) - units.sender(unit) + 1);
        }
        // A's rows g (x, y) and g + 8 (z, w), rows 2t (x, z) and 2t + 1 (y, w) of x.
        const int row = n * 8 + place % 4 * 2, rows = p.m - share.row_block * ROWS;
        const RowScale first(p, share, tile, row), second(p, share, tile, row + 1);  // while the sums are on their way
        uint4* from = shrink_sums(p, share, tile, group) + n * 32 + place;
        const size_t step = (size_t)X_TILES * 32 * SENDER_GROUPS;
        float4 c = {0, 0, 0, 0};
        for (int s = group; s < senders; s += SENDERS_AT_A_TIME * SENDER_GROUPS, from += SENDERS_AT_A_TIME * step)
            receive<1, SENDERS_AT_A_TIME>(&c, &c, -1, [&](int i, int) { return from + i * step; },
                                          (senders - s + SENDER_GROUPS - 1) / SENDER_GROUPS);
        __syncwarp();
#pragma unroll
        for (int other = SUM_LANES; other < 32; other *= 2) {
            c.x += __shfl_xor_sync(~0u, c.x, other), c.y += __shfl_xor_sync(~0u, c.y, other);
            c.z += __shfl_xor_sync(~0u, c.z, other), c.w += __shfl_xor_sync(~0u, c.w, other);
        }
        const u32 even = first.scaled(c.x, c.z), odd = second.scaled(c.y, c.w);
#pragma unroll
        for (int high = 0; high < 2; high++) {
            if (group) continue;
            if (row < rows) publish(shrunk_place(p, share, row, tile, place / 4 + 8 * high), even >> 16 * high);
            if (row + 1 < rows) publish(shrunk_place(p, share, row + 1, tile, place / 4 + 8 * high), odd >> 16 * high);
        }
        __syncwarp();
        if (lane == 0) add_release(p.counters + 2 * share.row_block, 1);
    }
}

// Waits until all of A x has been counted; up to 32 rows it then copies it into shared memory. Run by one thread of a
// block.
__device__ void wait_for_shrunk(const Params& p, const Share& share, u8* local, u64* shrunk) {
    int* counters = p.counters + 2 * share.row_block;
    while (load_acquire(counters) != p.parts * RANK_TILES * X_TILES * SENDER_GROUPS) {}
    if constexpr (SMALL_BATCH) {
        const u32 bytes = ROWS * p.parts * RANK * 2;
        asm volatile("fence.proxy.async;" ::: "memory");
        barrier_expect(shrunk, bytes);
        bulk_copy(local, (const u8*)p.shrunk + (size_t)share.row_block * bytes, bytes, shrunk);
    } else {
        barrier_arrive(shrunk);
    }
    // The last worker to have seen it resets the counters for the next launch.
    if (atomicAdd(counters + 1, 1) == share.workers * CLUSTER - 1) counters[0] = counters[1] = 0;
    // Even a thread block that needs none of it must not end before the copy, because its memory would be reused.
    barrier_wait(shrunk, 0);
}

// Run by the warps of A x; the barrier `shrunk` signals that A x is complete.
__device__ void shrink(const Params& p, const Share& share, u8* local, u64* shrunk, int number, int lane) {
    if constexpr (COHORT == BY_RUNS)
        shrink_by_runs(p, share, number, lane);
    else if constexpr (SMALL_BATCH)
        shrink_by_warps(p, share, number, lane);
    else
        wait_for_earlier_kernels();
    share_sums(p, share, number, lane);
    if (number == 0 && lane == 0) wait_for_shrunk(p, share, local, shrunk);
}

// --- B (A x) ---

// Tiles of 16 columns of B whose operands are in registers.
__device__ constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int RANKS_AT_A_TIME = RANK == 0      ? 1
                                : COHORT == BY_RUNS ? least(RANK_TILES, 2)
                                : SMALL_BATCH ? least(RANK_TILES, 4)
                                              : least(3 * RANK_TILES, EXPAND_TILES);

// Tiles of 16 columns of B, as operands for A x: lane t of a quad has four in a row, in place of those that the
// operand's definition gives it.
struct LoraOperand {
    uint2 low[RANKS_AT_A_TIME], high[RANKS_AT_A_TIME];

    // From column `first` of a run on, of the parts of both halves of the rows.
    __device__ __forceinline__ void load(const Params& p, const Tile& tile, int first, int lane, int run = 0) {
        if (tile.row >= p.rows) return;
#pragma unroll
        for (int j = 0; j < RANKS_AT_A_TIME; j++) {
            const int column = run * RANK + min(first + j * 16, RANK - 16) + lane % 4 * 4;
            low[j] = *(const uint2*)(tile.b_low + column), high[j] = *(const uint2*)(tile.b_high + column);
        }
    }
    // From the `first` of all parts' tiles on, one behind the other; those of other parts than the rows' are zero.
    __device__ __forceinline__ void load_tiles(const Params& p, const Tile& tile, int first, int tiles, int lane) {
#pragma unroll
        for (int j = 0; j < RANKS_AT_A_TIME; j++) {
            low[j] = high[j] = {0, 0};
            if (j >= tiles || tile.row >= p.rows) continue;
            const int part = (first + j) / max(RANK_TILES, 1), column = (first + j) % max(RANK_TILES, 1) * 16 + lane % 4 * 4;
            if (part == tile.low_part) low[j] = *(const uint2*)(tile.b_low + column);
            if (part == tile.high_part) high[j] = *(const uint2*)(tile.b_high + column);
        }
    }
};

// B (A x) for up to 32 rows of x: COUNT tiles of rows from `x_row` on. A x is in shared memory. The first columns of B
// are in registers, unless `again`.
template <int COUNT>
__device__ __forceinline__ void add_lora(const Params& p, u32 shrunk, int x_row, const Tile& tile, LoraOperand& b, bool again,
                                         int lane, float4 c[COUNT]) {
    if (tile.row >= p.rows) return;
    for (int first = 0; first < RANK_TILES; first += RANKS_AT_A_TIME) {
        if (first || (again && RANK_TILES > RANKS_AT_A_TIME)) b.load(p, tile, first * 16, lane);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int part = tile.low_part + half;
            if (part > tile.high_part) break;
            const bool low = half == 0, high = part == tile.high_part;
#pragma unroll
            for (int j = 0; j < RANKS_AT_A_TIME; j++) {
                if (first + j >= RANK_TILES) break;
                const u32 a[4] = {low ? b.low[j].x : 0, high ? b.high[j].x : 0, low ? b.low[j].y : 0, high ? b.high[j].y : 0};
                const u32 rows = shrunk + ((part * RANK_TILES + first + j) * ROWS + x_row) * 32 + lane * 8;
#pragma unroll
                for (int n = 0; n < COUNT; n++) {
                    const uint2 x = load_shared_pair(rows + n * 256);
                    multiply_add(c[n], a, x.x, x.y);
                }
            }
        }
    }
}

// B (A x) of a cohort, for COUNT tiles of rows of x from `first_tile` of the row block on. Up to 32 rows A x is in shared memory,
// at `local`.
template <int COUNT>
__device__ __forceinline__ void add_lora_of_runs(const Params& p, const Share& share, u64* shrunk, u32 local, int first_tile,
                                                 const Tile& tile, int lane, float4 c[COUNT]) {
    if (tile.row >= p.rows) return;
    const int first_row = share.row_block * ROWS + first_tile * 8;
    const u16* global = p.shrunk + (size_t)share.row_block * ROWS * p.parts * RANK + lane * 4;
    for (int first = 0; first < RANK_TILES; first += RANKS_AT_A_TIME) {
        LoraOperand b[COUNT];
        uint2 x[COUNT][2][RANKS_AT_A_TIME];
        TileRuns runs[COUNT];
#pragma unroll
        for (int n = 0; n < COUNT; n++) runs[n].begin(p, first_row + n * 8, lane);
#pragma unroll
        for (int n = 0; n < COUNT; n++) b[n].load(p, tile, first * 16, lane, runs[n].next());
        barrier_wait(shrunk, 0);
#pragma unroll
        for (int n = 0; n < COUNT; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int j = 0; j < RANKS_AT_A_TIME; j++) {
                    x[n][half][j] = {0, 0};
                    if (tile.low_part + half > tile.high_part || first + j >= RANK_TILES) continue;
                    const int row = ((tile.low_part + half) * RANK_TILES + first + j) * ROWS + (first_tile + n) * 8;
                    x[n][half][j] = SMALL_BATCH ? load_shared_pair(local + row * 32 + lane * 8)
                                                : load_once((const uint2*)(global + row * 16));
                }
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            for (;;) {
                float4 sum = c[n];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    if (tile.low_part + half > tile.high_part) break;
                    const bool low = half == 0, high = tile.low_part + half == tile.high_part;
#pragma unroll
                    for (int j = 0; j < RANKS_AT_A_TIME; j++) {
                        if (first + j >= RANK_TILES) break;
                        const u32 a[4] = {low ? b[n].low[j].x : 0, high ? b[n].high[j].x : 0, low ? b[n].low[j].y : 0,
                                          high ? b[n].high[j].y : 0};
                        multiply_add(sum, a, x[n][half][j].x, x[n][half][j].y);
                    }
                }
                runs[n].take(c[n], sum, lane);
                if (!runs[n].left) break;
                b[n].load(p, tile, first * 16, lane, runs[n].next());
            }
        }
    }
}

// The descriptor of a tile of A x in a stage: rows of 32 bytes, groups of 8 rows 256 bytes apart, 32-byte swizzle.
__device__ __forceinline__ u64 shrunk_descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(256 >> 4) << 32 | (u64)3 << 62;
}

// COUNT tiles from shared memory, of which `tiles` exist; B is zero for the others.
template <int COUNT>
__device__ __forceinline__ void multiply_shrunk(const LoraOperand& b, u32 x, int tiles, float4 c[X_TILES]) {
    begin_products();
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        const u32 a[4] = {b.low[j].x, b.high[j].x, b.low[j].y, b.high[j].y};
        multiply_add_shared(c, a, shrunk_descriptor(x + (j < tiles ? j : 0) * EXPAND_TILE_BYTES));
    }
    commit_products();
    wait_for_products<0>();
}

// B (A x) beyond 32 rows of x: tiles of A x come as stages.
__device__ __forceinline__ void add_lora_stages(const Params& p, const Tile& tile, int row, PipelineState& at, int lane,
                                                LoraOperand& b, float4 c[X_TILES]) {
    const Expansion expansion(p, row);
    for (int first = 0; first < expansion.tiles; first += EXPAND_TILES) {
        const int tiles = min(expansion.tiles - first, EXPAND_TILES);
        if (first) b.load_tiles(p, tile, expansion.first + first, tiles, lane);
        at.wait();
        const u32 x = at.address + WEIGHT_BYTES;
        if (tiles <= 2)
            multiply_shrunk<2>(b, x, tiles, c);
        else if (tiles <= 4)
            multiply_shrunk<least(4, RANKS_AT_A_TIME)>(b, x, tiles, c);
        else
            multiply_shrunk<RANKS_AT_A_TIME>(b, x, tiles, c);
        at.release(lane);
    }
}
