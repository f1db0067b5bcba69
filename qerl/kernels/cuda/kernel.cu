// The decode product: out = W x + b + B (A x) for few rows x, with W in 4 bits in the layout of `tiles.py`.
//
// Work division (stream-K): W is cut into blocks of 128 rows and 256 or 128 columns. The sequence of all blocks, row by row, is
// divided evenly among the thread blocks, the workers. Where several workers have parts of one row of blocks, they share out
// the rows of x: each adds up, for its own rows of x, the sums of all of them in the order of the blocks. Up to 16 rows of x, the
// worker that has the first block adds up all. The order of additions depends only on the shape of W and the number of
// multiprocessors. So the result is deterministic, and for one X_TILES and number of row blocks of x a row of x gives the same bits
// whatever the other rows are. Rows of x are those of a row block here; many_rows.cu says what differs beyond 128.
//
// Warps: one warp copies by bulk copies into a pipeline of stages; it prefetches weights before the kernel that computes x has
// ended. Eight warps unpack W in registers and multiply on the tensor cores. Up to 16 rows of x they use mma.sync: a warp takes 32
// rows of W and half of a stage's columns, so that x is read from shared memory four times, not eight. For more rows they use
// wgmma, which reads x once for 64 rows of W and takes two thirds of the time: mma.sync occupies a scheduler for 6 cycles for
// every product of 8 rows and lets it issue almost nothing else.
//
// Adapter: all workers together compute A x once. Up to 16 rows of x one warp computes a worker's share of it, up to 32 three do.
// For more rows, A's blocks are stages of the pipeline ahead of W's. The same one or three warps add up the sums that all sent.
// A x then comes back into shared memory: whole up to 32 rows, otherwise as a stage behind the last one of a row of blocks. Of a
// cohort those warps compute A x of any number of rows, and beyond 32 rows it is read from where they left it (lora.cu).
//
// Exchange: thread blocks hand sums to each other through memory that holds EMPTY, a value that no sum has, until a sum is
// there. The reader writes EMPTY back. So the data itself says that it has arrived.
//
// One compilation joins instructions, tile_scheduler, pipeline, lora, epilogue, many_rows and this file, which has W x and the
// kernel. The compiler's options define X_TILES, tiles of 8 rows of x; STAGES of the pipeline; RANK of the adapters, 0 or a
// multiple of 16; CLUSTER, the thread blocks of a worker; COHORT, whether and how rows of x have adapters of several runs
// (tile_scheduler.cu); and up to 32 rows REGISTERS, the limit of a thread.

// --- W x ---

// Scale bytes `first` and `first` + 2 of `word`, as bfloat16: byte times multiplier plus offset (tiles.py has the two codes).
__device__ __forceinline__ u32 scale_pair(u32 word, int first, const Params& p) {
    return __byte_perm(word, 0, first ? 0x4341 : 0x4240) * p.scale_multiplier + p.scale_offset;
}

__device__ __forceinline__ u32 twice(u32 pair, int half) {
    u32 d;
    if (half)
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }" : "=r"(d) : "r"(pair));
    else
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }" : "=r"(d) : "r"(pair));
    return d;
}

// Converts eight codes to the four registers of an MMA operand. Each code's bits go where bfloat16 has sign, exponent and
// mantissa, which makes the weight times 2^-126; the scale brings that to a normal number, exactly.
__device__ __forceinline__ void unpack(u32 word, u32 scale_low, u32 scale_high, u32 a[4]) {
    const u32 MASK = 0x81C081C0u;
    a[0] = multiply_bf16x2(word & MASK, scale_low);
    a[1] = multiply_bf16x2(__funnelshift_r(word, word, 6) & MASK, scale_high);
    a[2] = multiply_bf16x2((word << 4) & MASK, scale_low);
    a[3] = multiply_bf16x2(((word << 6) & 0x80C080C0u) | ((word >> 2) & 0x01000100u), scale_high);
}

__device__ __forceinline__ u32 component(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

__device__ __forceinline__ void unpack_group(const Params& p, const uint4& words, const uint4& scales, int half, int j,
                                             u32 a[4]) {
    const u32 low = scale_pair(half ? scales.y : scales.x, j % 2, p), high = scale_pair(half ? scales.w : scales.z, j % 2, p);
    unpack(component(words, j), twice(low, j / 2), twice(high, j / 2), a);
}

// Where in a stage a lane reads, up to 16 rows of x: its words of codes, its scales, and its columns of x.
struct Offsets {
    u32 words, scales, x;

    __device__ __forceinline__ Offsets(int warp, int lane) {
        const int block = warp / 4 % STAGE_BLOCKS;
        const u32 tiles = block * BLOCK_BYTES + warp % 4 * TILES * TILE_BYTES;
        // ldmatrix: lanes 8i to 8i + 7 give the rows of matrix i; the four are 8 columns each of one tile of rows, or two each
        // of two tiles. The copy has swizzled the 16-byte chunks of a row by its number.
        const u32 row = (X_TILES == 1 ? 0 : lane / 16 * 8) + lane % 8, chunk = (X_TILES == 1 ? lane / 8 : lane / 8 % 2) ^ lane % 8;
        words = kept(tiles + lane * 16);
        scales = kept(tiles + 1024 + lane / 4 * 16);
        x = kept(WEIGHT_BYTES + block * 2 * X_PART_BYTES + row * 128 + chunk * 16);
    }
};

// Up to 16 rows of x: each warp reads them into registers.
__device__ __forceinline__ void multiply_by_mma_sync(const Params& p, u32 stage, const Offsets& at, float4 c[TILES][X_TILES]) {
    uint4 scales[TILES];
#pragma unroll
    for (int r = 0; r < TILES; r++) scales[r] = load_shared(stage + at.scales + r * TILE_BYTES);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 words[TILES];
#pragma unroll
        for (int r = 0; r < TILES; r++) words[r] = load_shared(stage + at.words + r * TILE_BYTES + half * 512);
        u32 b[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            // 16 columns of x, or 32 with one tile of rows.
            const u32 x = ((stage + at.x) ^ j * 32) + half * X_PART_BYTES;
            if (X_TILES > 1 || j % 2 == 0) load_matrices(b, x);
#pragma unroll
            for (int r = 0; r < TILES; r++) {
                u32 a[4];
                unpack_group(p, words[r], scales[r], half, j, a);
#pragma unroll
                for (int n = 0; n < X_TILES; n++) {
                    const int k = X_TILES == 1 ? j % 2 : n;
                    multiply_add(c[r][n], a, b[2 * k], b[2 * k + 1]);
                }
            }
        }
    }
}

// More rows of x: multiplies the blocks up to `end` of one row. While some columns are multiplied, the next are unpacked.
// `stored`: the barrier of a stage that is still copied to `out`, or 0.
__device__ __forceinline__ void multiply_by_wgmma(const Params& p, PipelineState& at, int& next, int end, u32 stored, int warp,
                                              int lane, float4 c[X_TILES]) {
    // Of 16 columns: few products at a time take fewer registers, many fewer instructions. Likewise for words read ahead.
    constexpr int GROUPS_AT_A_TIME = X_TILES == 4 ? 4 : 2, HALVES = 2 * STAGE_BLOCKS;
    constexpr bool AHEAD = X_TILES > 4;
    const u32 offset = kept(warp * TILE_BYTES + lane * 16), scales_offset = kept(warp * TILE_BYTES + 1024 + lane / 4 * 16);
    u32 a[2][GROUPS_AT_A_TIME][4], empty = stored ? stored + SECOND_HALF : 0;
    do {
        at.wait();
        const u64 x = matrix_descriptor(kept_uniform(at.address + WEIGHT_BYTES));
        uint4 scales[STAGE_BLOCKS], words[HALVES];
        const auto load = [&](int half) {
            if (half % 2 == 0) scales[half / 2] = load_shared(at.address + scales_offset + half / 2 * BLOCK_BYTES);
            words[half] = load_shared(at.address + offset + half / 2 * BLOCK_BYTES + half % 2 * 512);
        };
        if (AHEAD) load(0);
#pragma unroll
        for (int group = 0; group < 4 * HALVES; group += GROUPS_AT_A_TIME) {
            const int half = group / 4;
            if (MANY_ROWS && group == 4) at.wait_for_second_half();
            if (group % 4 == 0 && half + AHEAD < HALVES) load(half + AHEAD);
            u32(*into)[4] = a[group / GROUPS_AT_A_TIME % 2];
#pragma unroll
            for (int j = 0; j < GROUPS_AT_A_TIME; j++)
                unpack_group(p, words[half], scales[half / 2], half % 2, group % 4 + j, into[j]);
            begin_products();
#pragma unroll
            for (int j = 0; j < GROUPS_AT_A_TIME; j++)
                multiply_add_shared(c, into[j], shifted(x, half * X_PART_BYTES + (group % 4 + j) * 32));
            commit_products();
            wait_for_products<1>();  // of those that read the registers which are written next
            if (MANY_ROWS && group == 0) {
                wait_for_stores_if(stored);
                at.leave_if(stored, lane, stored);
            }
            // These were the last of the stage before.
            if (group == 0) at.leave_if(empty, lane, empty);
            if (MANY_ROWS && group == 4) at.leave_if(at.empty(), lane, true);
        }
        empty = at.empty() + (MANY_ROWS ? SECOND_HALF : 0), stored = 0;
        at.advance();
    } while (++next < end);
    wait_for_products<0>();
    at.leave_if(empty, lane, true);
}

// Two warps have the same two tiles of rows, of different columns: each gives the other its sums of one tile.
__device__ __forceinline__ void exchange_tiles(float4* memory, int warp, int lane, float4 c[TILES][X_TILES]) {
    const int own = warp / 4;
    const auto place = [&](int tile, int n) { return memory + ((warp % 4 * 2 + tile) * X_TILES + n) * 32 + lane; };
#pragma unroll
    for (int n = 0; n < X_TILES; n++) *place(1 - own, n) = own ? c[0][n] : c[1][n];
    asm volatile("bar.sync %0, 64;" ::"r"(1 + warp % 4) : "memory");
#pragma unroll
    for (int n = 0; n < X_TILES; n++) {
        const float4 sum = own ? c[1][n] : c[0][n], more = *place(own, n);
        c[0][n] = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
    }
    asm volatile("bar.sync %0, 64;" ::"r"(1 + warp % 4) : "memory");
}

// Beyond 32 rows of x: multiplies the units of A that a thread block has ahead of those of W.
__device__ void multiply_a(const Params& p, const Share& share, PipelineState& at, int warp, int lane) {
    for (int done = 0; done < share.shrinks;) {
        const int row = share.unit(done) / share.column_blocks;
        const int last = min(done + (row + 1) * share.column_blocks - share.unit(done), share.shrinks);
        float4 c[X_TILES] = {};
#pragma unroll 1  // unrolled, the products would wait for each other
        for (; done < last; done++) {
            at.wait();
            shrink_stage(at.address, warp, c);
            at.release(lane);
        }
        leave_shrink_sums(p, share, row, warp, lane, c);
    }
}

__device__ void multiply(const Params& p, const Share& share, u8* stages, u64* barriers, u64* shrunk, u64* sent, int warp,
                         int lane) {
    float4* exchanged = (float4*)(stages + EXCHANGED);
    const RowSplit of_last(p, share);
    const Offsets offsets(warp, lane);
    PipelineState at(stages, barriers);
    // Before its first read of what earlier kernels wrote, every thread must have waited; x is waited for by its copier.
    wait_for_earlier_kernels();
    if constexpr (!SHRINK_BY_WARPS) multiply_a(p, share, at, warp, lane);
    u32 stored = 0;
    int row = share.first / share.column_blocks;
    for (int next = share.first; next < share.last; row++) {  // unit of W
        const int first = row * share.column_blocks, begin = next, end = min(first + share.column_blocks, share.last);
        const int tile_number = MMA_SYNC ? warp % 4 * 2 + warp / 4 : warp;
        const int place = tile_number * 32 + lane, tile_row = (row * CLUSTER + share.rank) * BLOCK_ROWS + tile_number * 16;
        const bool starts = begin == first, whole = starts && end == first + share.column_blocks, last = end == share.last;
        // Loading B takes as long as a stage. Up to 32 rows of x it is loaded into registers ahead, what doesn't fit into L2.
        LoraOperand b;
        if (RANK && (SMALL_BATCH && CHUNKS > 1 ? whole || last : starts)) {
            const Tile tile(p, tile_row, lane);
            if constexpr (COHORT == BY_RUNS) {
                tile.prefetch_b_of_runs(p, share.row_block * ROWS, lane);
            } else {
                if (SMALL_BATCH) b.load(p, tile, 0, lane);
                if (!SMALL_BATCH || RANK > RANKS_AT_A_TIME * 16) tile.prefetch_b(p, lane);
            }
        }
        float4 c[TILES][X_TILES] = {};
        if constexpr (MMA_SYNC) {
            for (; next < end; next++) {
                at.wait();
                multiply_by_mma_sync(p, at.address, offsets, c);
                at.release(lane);
            }
            exchange_tiles(exchanged, warp, lane, c);
        } else {
            multiply_by_wgmma(p, at, next, end, stored, warp, lane, c[0]);
        }
        const Tile tile(p, tile_row, lane);
        scale_sums(p, tile, c[0]);
        if constexpr (!SMALL_BATCH && COHORT == BY_RUNS) {
            constexpr int COUNT = X_TILES <= 16 ? 2 : 1;  // what registers have room for
            if (starts)
#pragma unroll
                for (int n = 0; n < X_TILES; n += COUNT)
                    add_lora_of_runs<COUNT>(p, share, shrunk, 0, n, tile, lane, c[0] + n);
        } else if (!SMALL_BATCH && RANK && starts) {
            const Expansion expansion(p, row);
            b.load_tiles(p, tile, expansion.first, expansion.tiles, lane);
            add_lora_stages(p, tile, row, at, lane, b, c[0]);
        }
        const RowSplit split = whole ? RowSplit::whole() : last ? of_last : RowSplit::of_first();
        if constexpr (MANY_ROWS)
            stored = ManyRowsEpilogue{p, share, split, tile, sent, place, lane}.run(at, c[0]);
        else
            Epilogue{p, share, split, tile, b, shrunk, stages + LOCAL, (float4*)stages, place, lane}.run(whole, last, c[0]);
    }
    wait_for_stores_if(MANY_ROWS);
}

constexpr bool PASS_REGISTERS = X_TILES == 32;  // to the warps that multiply, from the others
constexpr int THREADS = (WARPS + 1 + SHRINK_WARPS) * 32;

// With up to 16 rows two thread blocks share a multiprocessor: the next kernel's has its weights on their way while this
// one ends.
#if X_TILES <= 4
#define LAUNCH_LIMIT __maxnreg__(REGISTERS)
#else
#define LAUNCH_LIMIT __launch_bounds__(THREADS, 1)
#endif

#if CLUSTER > 1
#define CLUSTERS __cluster_dims__(CLUSTER)
#else
#define CLUSTERS
#endif

extern "C" __global__ void LAUNCH_LIMIT CLUSTERS w4a16(const __grid_constant__ Params p) {
    extern __shared__ u8 unaligned[];
    __shared__ u64 barriers[(MANY_ROWS ? 4 : 2) * STAGES], shrunk, sent;  // of stages: they are full; they are empty
    u8* stages = unaligned + (-shared_address(unaligned) & 1023);  // what swizzled copies need
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const Share share(p);
    if (threadIdx.x == 0) {
        barrier_init(&shrunk, 1);
        if (MANY_ROWS) barrier_init(&sent, WARPS);
        for (int i = 0; i < STAGES; i++) barrier_init(barriers + i, 1), barrier_init(barriers + STAGES + i, WARPS * CLUSTER);
        if (MANY_ROWS)
            for (int i = 2 * STAGES; i < 3 * STAGES; i++)
                barrier_init(barriers + i, 1), barrier_init(barriers + STAGES + i, WARPS * CLUSTER);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (MANY_ROWS)
        cluster_sync();
    else
        __syncthreads();
    let_next_kernel_start();
    if (warp < WARPS) {
        if (PASS_REGISTERS) asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
        multiply(p, share, stages, barriers, &shrunk, &sent, warp, lane);
    } else {
        if (PASS_REGISTERS) asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
        if constexpr (MANY_ROWS) {
            if (warp == WARPS && lane == 0) ManyRowsCopier(p, share, stages, barriers, &shrunk).run();
        } else {
            if (warp == WARPS && lane == 0) copy(p, share, stages, barriers, &shrunk);
        }
        if (warp > WARPS && RANK) shrink(p, share, stages + LOCAL, &shrunk, warp - WARPS - 1, lane);
        if (MANY_ROWS && warp == WARPS + SHRINK_WARPS && lane == 0) announce_sums(p, share, &sent);
    }
    if (MANY_ROWS) cluster_sync();  // the other thread block copies into this one's memory and arrives at its barriers
}
