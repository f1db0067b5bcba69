// The decode product: out = W x + b + B (A x) for few rows x, with W in 4 bits as `qerl.kernels.tiles` lays it out.
//
// W is cut into blocks of 128 rows and 256 or 128 columns. The sequence of all, row by row, is divided evenly among the
// thread blocks (stream-K). Where a row of blocks is divided, those who have parts of it share out the rows of x, and each adds
// up what all computed for its own, in the order of the blocks; with the fewest rows who has the first block adds up all. That
// order depends on the shape of W and the number of multiprocessors alone: the result is deterministic, and for one NT a row
// of x gives the same whatever other rows there are.
//
// One warp copies (bulk copies into a ring of stages; weights are prefetched before the kernel that computes x ends), eight
// unpack W in registers and multiply on the tensor cores. Up to 16 rows of x by mma.sync: a warp takes 32 rows of W, so that
// x is read from shared memory four times, not eight, and half of a stage's columns. More rows by wgmma, which reads x once
// for 64 rows of W and takes two thirds of the time: mma.sync needs 6 cycles of a scheduler for every product of 8 rows, in
// which it issues next to nothing else.
//
// A x is computed once, by all thread blocks together. With few rows of x a warp of its own computes a share of it, with 17 to
// 32 three do; with many, shares are stages ahead of W's. The same warp, or three, adds up what all sent. A x then comes back
// into shared memory, whole or, with many rows, as a stage behind the last of a row of blocks.
//
// Thread blocks hand sums to each other through memory that holds EMPTY, which no sum is, until they are there; the reader
// puts EMPTY back. So data and "it is there" arrive together.
//
// The parts are compiled as one: w4a16_instructions, w4a16_division, w4a16_ring, w4a16_lora, w4a16_end and this one, W x and
// the kernel.
// Defined by the compiler's options: NT, tiles of 8 rows of x; STAGES of the ring; RANK of the adapters or 0, a multiple of
// 16; up to 32 rows REGISTERS of a thread.

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

// Eight codes to the four registers of an MMA operand: each code's bits where bfloat16 has sign, exponent and mantissa,
// which makes them the weight times 2^-126; the scale brings that to a normal number, exactly.
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

// Where in a stage a lane of a warp reads, with few rows of x: its words of codes, scales, and columns of x.
struct Offsets {
    u32 words, scales, x;

    __device__ __forceinline__ Offsets(int warp, int lane) {
        const int block = warp / 4 % STAGE_BLOCKS;
        const u32 tiles = block * BLOCK_BYTES + warp % 4 * TILES * TILE_BYTES;
        // ldmatrix: lanes 8i to 8i + 7 give the rows of matrix i; the four are 8 columns each of one tile of rows, or two each
        // of two tiles. The copy has swizzled the 16-byte chunks of a row by its number.
        const u32 row = (NT == 1 ? 0 : lane / 16 * 8) + lane % 8, chunk = (NT == 1 ? lane / 8 : lane / 8 % 2) ^ lane % 8;
        words = kept(tiles + lane * 16);
        scales = kept(tiles + 1024 + lane / 4 * 16);
        x = kept(WEIGHT_BYTES + block * 2 * X_PART_BYTES + row * 128 + chunk * 16);
    }
};

// Few rows of x: each warp reads them into registers.
__device__ __forceinline__ void multiply_few(const Params& p, u32 stage, const Offsets& at, float4 c[TILES][NT]) {
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
            if (NT > 1 || j % 2 == 0) load_matrices(b, x);
#pragma unroll
            for (int r = 0; r < TILES; r++) {
                u32 a[4];
                unpack_group(p, words[r], scales[r], half, j, a);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const int k = NT == 1 ? j % 2 : n;
                    multiply_add(c[r][n], a, b[2 * k], b[2 * k + 1]);
                }
            }
        }
    }
}

// More rows of x, blocks up to `end` of one row: while some columns are multiplied, the next are unpacked.
__device__ __forceinline__ void multiply_many(const Params& p, Place& at, int& next, int end, int warp, int lane,
                                              float4 c[NT]) {
    // Of 16 columns: few products at a time take fewer registers, many fewer instructions. Likewise for words read ahead.
    constexpr int GROUPS_AT_A_TIME = NT == 4 ? 4 : 2, HALVES = 2 * STAGE_BLOCKS;
    constexpr bool AHEAD = NT > 4;
    const u32 offset = kept(warp * TILE_BYTES + lane * 16), scales_offset = kept(warp * TILE_BYTES + 1024 + lane / 4 * 16);
    u32 a[2][GROUPS_AT_A_TIME][4], empty = 0;
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
            // These were the last of the stage before.
            if (group == 0) barrier_arrive_if(empty, empty && lane == 0);
        }
        empty = at.empty();
        at.advance();
    } while (++next < end);
    wait_for_products<0>();
    barrier_arrive_if(empty, lane == 0);
}

// Two warps that have the same two tiles of rows, of different columns, give each other their sums of one.
__device__ __forceinline__ void exchange_tiles(float4* memory, int warp, int lane, float4 c[TILES][NT]) {
    const int own = warp / 4;
    const auto place = [&](int tile, int n) { return memory + ((warp % 4 * 2 + tile) * NT + n) * 32 + lane; };
#pragma unroll
    for (int n = 0; n < NT; n++) *place(1 - own, n) = own ? c[0][n] : c[1][n];
    asm volatile("bar.sync %0, 64;" ::"r"(1 + warp % 4) : "memory");
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const float4 sum = own ? c[1][n] : c[0][n], more = *place(own, n);
        c[0][n] = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
    }
    asm volatile("bar.sync %0, 64;" ::"r"(1 + warp % 4) : "memory");
}

// The units of A that a thread block has ahead of those of W, with many rows of x.
__device__ void multiply_a(const Params& p, const Share& share, Place& at, int warp, int lane) {
    for (int done = 0; done < share.shrinks;) {
        const int row = share.unit(done) / share.column_blocks;
        const int last = min(done + (row + 1) * share.column_blocks - share.unit(done), share.shrinks);
        float4 c[NT] = {};
#pragma unroll 1  // unrolled, the products would wait for each other
        for (; done < last; done++) {
            at.wait();
            shrink_many(at.address, warp, c);
            at.release(lane == 0);
        }
        leave_shrink_sums(p, share, row, warp, lane, c);
    }
}

__device__ void multiply(const Params& p, const Share& share, u8* stages, u64* barriers, u64* shrunk, int warp, int lane) {
    float4* exchanged = (float4*)(stages + EXCHANGED);
    const Division of_last(p, share);
    const Offsets offsets(warp, lane);
    Place at(stages, barriers);
    // Before its first read of what earlier kernels wrote, every thread must have waited; x is waited for by its copier.
    wait_for_earlier_kernels();
    if constexpr (!FEW) multiply_a(p, share, at, warp, lane);
    int row = share.first / share.column_blocks;
    for (int next = share.first; next < share.last; row++) {  // unit of W
        const int first = row * share.column_blocks, begin = next, end = min(first + share.column_blocks, share.last);
        const int tile_number = SYNC ? warp % 4 * 2 + warp / 4 : warp;
        const int place = tile_number * 32 + lane, tile_row = row * BLOCK_ROWS + tile_number * 16;
        const bool starts = begin == first, whole = starts && end == first + share.column_blocks, last = end == share.last;
        // B takes as long as a stage: with few rows of x it waits in registers, or in L2 as far as they don't suffice.
        LoraOperand b;
        if (RANK && (FEW && CHUNKS > 1 ? whole || last : starts)) {
            const Tile tile(p, tile_row, lane);
            if (FEW) b.load(p, tile, 0, lane);
            if (!FEW || RANK > RANKS_AT_A_TIME * 16) tile.prefetch_b(p, lane);
        }
        float4 c[TILES][NT] = {};
        if constexpr (SYNC) {
            for (; next < end; next++) {
                at.wait();
                multiply_few(p, at.address, offsets, c);
                at.release(lane == 0);
            }
            exchange_tiles(exchanged, warp, lane, c);
        } else {
            multiply_many(p, at, next, end, warp, lane, c[0]);
        }
        const Tile tile(p, tile_row, lane);
        scale_sums(p, tile, c[0]);
        if (!FEW && RANK && starts) {
            const Expansion expansion(p, row);
            b.load_tiles(p, tile, expansion.first, expansion.tiles, lane);
            add_lora_stages(p, tile, row, at, lane, b, c[0]);
        }
        const Division division = whole ? Division::whole() : last ? of_last : Division::of_first();
        RowEnd{p, share, division, tile, b, shrunk, stages + LOCAL, (float4*)stages, place, lane}.run(whole, last, c[0]);
    }
}

constexpr bool PASS_REGISTERS = NT == 32;  // to the warps that multiply, from the others
constexpr int THREADS = (WARPS + 1 + SHRINKERS) * 32;

// With up to 16 rows two thread blocks share a multiprocessor: the next kernel's has its weights on their way while this
// one ends.
#if NT <= 4
#define LIMIT __maxnreg__(REGISTERS)
#else
#define LIMIT __launch_bounds__(THREADS, 1)
#endif

extern "C" __global__ void LIMIT w4a16(const __grid_constant__ Params p) {
    extern __shared__ u8 unaligned[];
    __shared__ u64 barriers[2 * STAGES], shrunk;  // of stages: they are full; they are empty
    u8* stages = unaligned + (-shared_address(unaligned) & 1023);  // what swizzled copies need
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const Share share(p);
    if (threadIdx.x == 0) {
        barrier_init(&shrunk, 1);
        for (int i = 0; i < STAGES; i++) barrier_init(barriers + i, 1), barrier_init(barriers + STAGES + i, WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_kernel_start();
    if (warp < WARPS) {
        if (PASS_REGISTERS) asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
        multiply(p, share, stages, barriers, &shrunk, warp, lane);
    } else {
        if (PASS_REGISTERS) asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
        if (warp == WARPS && lane == 0) copy(p, share, stages, barriers, &shrunk);
        if (warp > WARPS && RANK) shrink(p, share, stages + LOCAL, &shrunk, warp - WARPS - 1, lane);
    }
}
