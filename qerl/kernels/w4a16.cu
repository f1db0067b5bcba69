// The decode product: out = W x + b + B (A x) for few rows x, with W in 4 bits as `qerl.kernels.tiles` lays it out.
//
// W is cut into blocks of 128 rows and 256 or 128 columns. The sequence of all, row by row, is divided evenly among the
// thread blocks (stream-K); where a row of blocks is divided, the one that has its first block adds up what the others
// computed, in the order of the blocks. That order depends on the shape of W and the number of multiprocessors alone:
// the result is deterministic, and for one NT a row of x gives the same whatever other rows there are.
//
// One warp copies (bulk copies into a ring of stages; weights are prefetched before the kernel that computes x ends), eight
// or twelve unpack W in registers and multiply on the tensor cores. Up to 32 rows of x by mma.sync: a warp takes 32 rows of
// W, so that x is read from shared memory four times, not eight; a team of four warps takes a block. Two teams share a stage
// of 256 columns; with 17 to 32 rows three take stages of 128 columns in turn. More rows by wgmma, which reads x once for 64
// rows of W, but takes some 32 cycles longer than its products need.
//
// A x is computed once, by all thread blocks together. With few rows of x a warp of its own computes a share of it; with many,
// shares are stages ahead of W's. The same warp, or three, adds up what all sent; with many rows A x then comes back as a stage
// behind the last of a row of blocks.
//
// Thread blocks hand sums to each other through memory that holds EMPTY, which no sum is, until they are there; the reader
// puts EMPTY back. So data and "it is there" arrive together.
//
// The parts are compiled as one: w4a16_instructions, w4a16_work, w4a16_lora and this one, W x and the kernel.
// Defined by the compiler's options: NT, tiles of 8 rows of x; STAGES of the ring; up to 32 rows REGISTERS of a thread and
// TEAMS of warps that multiply.

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
        u32 b[NT == 4 ? 8 : 4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            // 16 columns of x, or 32 with one tile of rows.
            const u32 x = ((stage + at.x) ^ j * 32) + half * X_PART_BYTES;
            if (NT > 1 || j % 2 == 0)
#pragma unroll
                for (int i = 0; i < (NT == 4 ? 2 : 1); i++) load_matrices(b + 4 * i, x + i * 16 * 128);
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

// Many rows of x: while 64 columns are multiplied, the next are unpacked.
__device__ __forceinline__ void multiply_many(const Params& p, u32 stage, int warp, int lane, float4 c[NT]) {
    const u64 x = matrix_descriptor(stage + WEIGHT_BYTES);
    u32 a[2][4][4];
#pragma unroll
    for (int block = 0; block < STAGE_COLUMNS / BLOCK_COLUMNS; block++) {
        const u32 tile = stage + block * BLOCK_BYTES + warp * TILE_BYTES;
        const uint4 scales = load_shared(tile + 1024 + lane / 4 * 16);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 words = load_shared(tile + half * 512 + lane * 16);
            if (block) wait_for_products<1>();  // of those that read the same registers
#pragma unroll
            for (int j = 0; j < 4; j++) unpack_group(p, words, scales, half, j, a[half][j]);
            begin_products();
#pragma unroll
            for (int j = 0; j < 4; j++)
                multiply_add_shared(c, a[half][j], x + ((block * 2 + half) * X_PART_BYTES + j * 32) / 16);
            commit_products();
        }
    }
    wait_for_products<0>();
}

// Which of its two tiles a warp of `team` has the sums of at the end of a row of blocks; 2 for none. Of three teams each in
// turn has none.
__device__ __forceinline__ int own_tile(int team, int row) { return TEAMS == 2 ? team : (team + row) % TEAMS; }

// All warps that have the same two tiles give their sums of each to the warp whose own it is.
__device__ __forceinline__ void exchange_tiles(float4* memory, int row, int warp, int lane, float4 c[TILES][NT]) {
    const int own = own_tile(warp / 4, row);
    const auto place = [&](int tile, int from, int n) {
        return memory + (((warp % 4 * 2 + tile) * (TEAMS - 1) + from) * NT + n) * 32 + lane;
    };
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
        for (int n = 0; n < NT; n++)
            if (own != tile) *place(tile, own - (own > tile), n) = c[tile][n];
    asm volatile("bar.sync %0, %1;" ::"r"(1 + warp % 4), "n"(TEAMS * 32) : "memory");
#pragma unroll
    for (int n = 0; n < NT; n++) {
        float4 sum = own ? c[1][n] : c[0][n];
#pragma unroll
        for (int other = 0; other < TEAMS - 1; other++) {
            const float4 more = *place(own ? 1 : 0, other, n);
            sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
        }
        c[0][n] = sum;
    }
    asm volatile("bar.sync %0, %1;" ::"r"(1 + warp % 4), "n"(TEAMS * 32) : "memory");
}

// Sums of a divided row of blocks, for the thread block that has its first block; `place` is a lane's among those of all tiles.
__device__ void leave_sums(const Params& p, int place, const float4 c[NT]) {
    uint4* mine = p.sums + (size_t)blockIdx.x * BLOCK_ROWS * ROWS / 4 + place;
#pragma unroll
    for (int n = 0; n < NT; n++) send(mine + n * BLOCK_TILES * 32, c[n]);
}

__device__ void add_sums(const Params& p, int peers, int place, float4 c[NT]) {
    constexpr int SUMS = NT <= 4 ? NT : 4, BATCH = 8 / SUMS;
    const size_t step = (size_t)p.row_blocks * BLOCK_ROWS * ROWS / 4;
    uint4* from = p.sums + (size_t)blockIdx.x * BLOCK_ROWS * ROWS / 4 + place;
    for (int peer = 0; peer < peers; peer += BATCH)
#pragma unroll
        for (int n = 0; n < NT; n += SUMS)
            receive<SUMS, BATCH>(c + n, from + (peer + 1) * step + n * BLOCK_TILES * 32, step, BLOCK_TILES * 32, peers - peer);
}

// What is in `out` now, at the places where this lane writes.
__device__ __forceinline__ void load_residual(const Params& p, const Tile& tile, int first_x_row, int lane, u32 before[NT][2]) {
    if (p.mode != RESIDUAL || tile.row >= p.rows) return;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const int x_row = min(first_x_row + n * 8 + lane / 4, p.m - 1);
        const u32* out = (const u32*)(p.out + (size_t)x_row * p.rows + tile.row + 2 * (lane % 4));
        before[n][0] = out[0], before[n][1] = out[4];
    }
}

// x / (1 + e^-x) without the branches of exact division, off by some 2^-22.
__device__ __forceinline__ float silu(float x) {
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.442695041f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1 + power));
    return x * inverse;
}

__device__ void finish_tile(const Params& p, const Tile& tile, int first_x_row, int lane, const u32 before[NT][2],
                            float4 c[NT]) {
    if (tile.row >= p.rows) return;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        c[n].x += tile.low_bias, c[n].y += tile.low_bias, c[n].z += tile.high_bias, c[n].w += tile.high_bias;
        const int x_row = first_x_row + n * 8 + g;
        if (p.mode == SILU) {
            const float even = silu(c[n].x) * c[n].z, odd = silu(c[n].y) * c[n].w;
            const u32 pair = transpose_matrix(to_bf16x2(even, odd));
            if (x_row < p.m) *(u32*)(p.out + (size_t)x_row * (p.rows / 2) + tile.row / 2 + 2 * t) = pair;
            continue;
        }
        u32 pairs[2] = {transpose_matrix(to_bf16x2(c[n].x, c[n].y)), transpose_matrix(to_bf16x2(c[n].z, c[n].w))};
        if (x_row >= p.m) continue;
        u32* out = (u32*)(p.out + (size_t)x_row * p.rows + tile.row + 2 * t);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 b = before[n][i];
            if (p.mode == RESIDUAL)
                pairs[i] = to_bf16x2(low_float(pairs[i]) + low_float(b), high_float(pairs[i]) + high_float(b));
            out[4 * i] = pairs[i];
        }
    }
}

// From the products of W's codes and scales to those of W.
__device__ __forceinline__ void scale_sums(const Params& p, const Tile& tile, float4 c[NT]) {
    const float low = p.factor[tile.low_part], high = p.factor[tile.high_part];
#pragma unroll
    for (int n = 0; n < NT; n++) c[n].x *= low, c[n].y *= low, c[n].z *= high, c[n].w *= high;
}

// The end of a row of blocks, of which `peers` other thread blocks have a part; `b` holds the first of B with few rows of x.
__device__ __forceinline__ void finish(const Params& p, const Share& share, int row, int peers, int place, Place& at,
                                       u64* shrunk, const Tile& tile, LoraOperand& b, int lane, float4 c[NT]) {
    const int first_x_row = share.row_block * ROWS;
    u32 before[NT][2];
    if constexpr (FEW) load_residual(p, tile, first_x_row, lane, before);
    // A x, if it is there: it takes as long to load as the others' sums. The first row of blocks may have to wait for it.
    ShrunkOperand x[SHRUNK_PARTS];
    const bool early = SHRUNK_PARTS > 1 && p.rank && barrier_passed(shrunk, 0);
    if (early) load_shrunk(p, share, tile, 0, lane, x);
    add_sums(p, peers, place, c);
    scale_sums(p, tile, c);
    if (FEW && p.rank) {
        if (!early) barrier_wait(shrunk, 0), load_shrunk(p, share, tile, 0, lane, x);
        add_lora(p, share, tile, b, x, lane, c);
    }
    if (!FEW && p.rank) {
        const Expansion expansion(p, row);
        b.load_tiles(p, tile, expansion.first, expansion.tiles, lane);
        add_lora_stages(p, tile, row, at, lane, b, c);
    }
    if constexpr (!FEW) load_residual(p, tile, first_x_row, lane, before);
    finish_tile(p, tile, first_x_row, lane, before, c);
}

__device__ void multiply(const Params& p, const Share& share, u8* stages, u64* barriers, u64* shrunk, int warp, int lane) {
    float4* exchanged = (float4*)(stages + STAGES * STAGE_BYTES);
    const int team = warp / 4, first_stage = team / STAGE_BLOCKS % STRIDE, peers_of_last = share.peers(p);
    const Offsets offsets(warp, lane);
    Place at(stages, barriers, first_stage);
    // Before its first read of what earlier kernels wrote, every thread must have waited; x is waited for by its copier.
    wait_for_earlier_kernels();
    for (int done = 0, row = 0, next = first_stage; done < share.stages();) {
        const bool of_a = !FEW && done < share.shrinks;
        row = done == 0 || done == share.shrinks ? share.unit(done) / share.column_blocks : row + 1;
        const int begin = share.unit(done), first = row * share.column_blocks, end = first + share.column_blocks;
        const int last = min(done + end - begin, of_a ? share.shrinks : share.stages());
        const int own = FEW ? own_tile(team, row) : 0, tile_number = FEW ? warp % 4 * 2 + own : warp;
        const int place = tile_number * 32 + lane, tile_row = row * BLOCK_ROWS + tile_number * 16;
        const bool finishes = !of_a && begin == first && own < 2;
        // B takes as long as a stage: with few rows of x it waits in registers, or in L2 as far as they don't suffice.
        LoraOperand b;
        if (p.rank && finishes) {
            const Tile tile(p, tile_row, lane);
            if (FEW) b.load(p, tile, 0, lane);
            if (!FEW || p.rank > RANKS_AT_A_TIME * 16) tile.prefetch_b(p, lane);
        }
        float4 c[TILES][NT] = {};
        for (; next < last; next += STRIDE) {
            at.wait();
            if constexpr (FEW)
                multiply_few(p, at.address, offsets, c);
            else if (of_a)
                shrink_many(at.address, warp, c[0]);
            else
                multiply_many(p, at.address, warp, lane, c[0]);
            at.release(lane == 0);
        }
        const bool divided = last - done < end - begin;
        done = STRIDE == 1 ? next : last;  // the same, in one register
        if (of_a) {
            leave_shrink_sums(p, share, row, warp, lane, c[0]);
            continue;
        }
        if constexpr (FEW) exchange_tiles(exchanged, row, warp, lane, c);
        if (finishes)
            finish(p, share, row, divided ? peers_of_last : 0, place, at, shrunk, Tile(p, tile_row, lane), b, lane, c[0]);
        else if (own < 2)
            leave_sums(p, place, c[0]);
    }
}

constexpr bool PASS_REGISTERS = NT == 32;  // to the warps that multiply, from the others
constexpr int THREADS = (WARPS + 1 + SHRINKERS) * 32;

// With up to 32 rows two thread blocks share a multiprocessor: the next kernel's has its weights on their way while this
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
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Share share(p);
    if (threadIdx.x == 0) {
        barrier_init(&shrunk, 1);
        for (int i = 0; i < STAGES; i++) barrier_init(barriers + i, 1), barrier_init(barriers + STAGES + i, WARPS / STRIDE);
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
        if (warp > WARPS && p.rank) shrink(p, share, &shrunk, warp - WARPS - 1, lane);
    }
}
