// The adapter: A x (shrink) and B (A x) (expand).

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

    __device__ __forceinline__ void multiply(const Params& p, int x_row, int column, float4 c[X_TILES]) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < X_TILES; n++) {
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
            a.multiply(p, share.row_block * ROWS, block * BLOCK_COLUMNS, c);
        }
        uint4* sums = shrink_sums(p, share, tile, sender);
#pragma unroll
        for (int n = 0; n < X_TILES; n++) send(sums + n * 32 + lane, c[n]);
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
    return block + (SMALL_BATCH ? a : half * 8 + a / 4 * 2 + a % 2);
}

// Senders whose sums the lanes of a warp read at the same time: as many as fit into registers.
constexpr int SENDER_GROUPS = SMALL_BATCH || RANK_TILES <= 2 ? 4 : 2, SENDERS_AT_A_TIME = SENDER_GROUPS == 4 ? 10 : 8;
constexpr int SUM_LANES = 32 / SENDER_GROUPS;

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
        if constexpr (!SMALL_BATCH) {
            const int unit = tile / (SHRINK_ROWS * CLUSTER / 16) * share.column_blocks;
            senders = 2 * (units.sender(unit + share.column_blocks - 1) - units.sender(unit) + 1);
        }
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
        // A's rows g (x, y) and g + 8 (z, w), rows 2t (x, z) and 2t + 1 (y, w) of x.
        const int row = n * 8 + place % 4 * 2, rows = p.m - share.row_block * ROWS;
        const float factor = p.lora_factor[tile / p.run_tiles];
        u32 even = to_bf16x2(c.x * factor, c.z * factor), odd = to_bf16x2(c.y * factor, c.w * factor);
        if (p.runs) {  // a row of x takes the ranks of its own run
            const int run = tile % max(RANK_TILES, 1) / p.run_tiles, first = share.row_block * ROWS + row;
            if (row >= rows || p.runs[first] != run) even = 0;
            if (row + 1 >= rows || p.runs[first + 1] != run) odd = 0;
        }
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
    if constexpr (SMALL_BATCH)
        shrink_by_warps(p, share, number, lane);
    else
        wait_for_earlier_kernels();
    share_sums(p, share, number, lane);
    if (number == 0 && lane == 0) wait_for_shrunk(p, share, local, shrunk);
}

// --- B (A x) ---

// Tiles of 16 columns of B whose operands are in registers.
__device__ constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int RANKS_AT_A_TIME = RANK == 0 ? 1 : SMALL_BATCH ? least(RANK_TILES, 4) : least(3 * RANK_TILES, EXPAND_TILES);

// Tiles of 16 columns of B, as operands for A x: lane t of a quad has four in a row, in place of those that the
// operand's definition gives it.
struct LoraOperand {
    uint2 low[RANKS_AT_A_TIME], high[RANKS_AT_A_TIME];

    // From column `first` on, of the parts of both halves of the rows.
    __device__ __forceinline__ void load(const Params& p, const Tile& tile, int first, int lane) {
        if (tile.row >= p.rows) return;
#pragma unroll
        for (int j = 0; j < RANKS_AT_A_TIME; j++) {
            const int column = min(first + j * 16, RANK - 16) + lane % 4 * 4;
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
