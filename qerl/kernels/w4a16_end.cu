// The end of a row of blocks: others' sums, B (A x), bias, residual or SiLU; the decode product's fifth part of six.

// What is in `out` now, at the places where this lane writes.
template <int COUNT>
__device__ __forceinline__ void load_residual(const Params& p, const Tile& tile, int first_x_row, int lane,
                                              u32 before[COUNT][2]) {
    if (p.mode != RESIDUAL || tile.row >= p.rows) return;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
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

template <int COUNT>
__device__ __forceinline__ void finish_tile(const Params& p, const Tile& tile, int first_x_row, int lane,
                                            const u32 before[COUNT][2], float4 c[COUNT]) {
    if (tile.row >= p.rows) return;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
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

// The end of a row of blocks, for a lane of a warp that has a tile of it.
struct RowEnd {
    const Params& p;
    const Share& share;
    const Division& division;
    const Tile& tile;
    LoraOperand& b;  // with few rows of x the first of B
    u64* shrunk;
    const u8* local;  // A x, with few rows of x
    float4* kept;     // this thread block's own sums, in the ring, which is unused by then
    int place, lane;  // the lane's place among those of all tiles, and in its warp

    // Sends what others own of the sums. What this thread block owns beside them goes into `kept`, so that it can be taken in a
    // loop and the registers are free.
    __device__ __forceinline__ void share_out(const float4 c[NT]) const {
        uint4* mine = division.sums(p, division.me) + place;
        if (!SYNC && division.me < division.owners) asm volatile("bar.sync 5, %0;" ::"n"(WARPS * 32) : "memory");
#pragma unroll
        for (int n = 0; n < NT; n++)
            if (division.owner(n / SUMS) != division.me)
                send(mine + n * BLOCK_TILES * 32, c[n]);
            else if (!SYNC)
                kept[n * BLOCK_TILES * 32 + place] = c[n];
    }

    // The sums of all parts of COUNT tiles of x from `first` on, in the parts' order; ALONE, part 0 has the first.
    template <int COUNT, bool ALONE>
    __device__ __forceinline__ void add_sums(int first, float4 c[COUNT]) const {
        constexpr int BATCH = ALONE ? 8 / COUNT : 8;
        float4 sum[COUNT];
#pragma unroll
        for (int n = 0; n < COUNT; n++) sum[n] = ALONE ? c[n] : float4{0, 0, 0, 0};
        for (int i = ALONE; i < division.count; i += BATCH)
            receive<COUNT, BATCH>(
                sum, c, ALONE ? -1 : division.me - i,
                [&](int part, int n) { return division.sums(p, i + part) + place + (first + n) * BLOCK_TILES * 32; },
                division.count - i);
#pragma unroll
        for (int n = 0; n < COUNT; n++) c[n] = sum[n];
    }

    // COUNT tiles of x from `first` on.
    template <int COUNT, bool ALONE>
    __device__ __forceinline__ void finish(int first, float4 c[COUNT]) const {
        const int x_row = share.row_block * ROWS + first * 8;
        u32 before[COUNT][2];
        load_residual<COUNT>(p, tile, x_row, lane, before);
        if (division.count > 1) add_sums<COUNT, ALONE>(first, c);
        if (FEW && RANK) {
            barrier_wait(shrunk, 0);
            add_lora<COUNT>(p, shared_address(local), first * 8, tile, b, first > 0, lane, c);
        }
        finish_tile<COUNT>(p, tile, x_row, lane, before, c);
    }

    // What this thread block owns of a row that others have parts of.
    template <int COUNT, bool ALONE>
    __device__ __forceinline__ void finish_kept() const {
#pragma unroll 1
        for (int first = 0; first < NT; first += COUNT) {
            if (division.owner(first / SUMS) != division.me) continue;
            float4 own[COUNT];
#pragma unroll
            for (int n = 0; n < COUNT; n++) own[n] = kept[(first + n) * BLOCK_TILES * 32 + place];
            finish<COUNT, ALONE>(first, own);
        }
    }

    // `c`: the sums of this thread block's part.
    __device__ __forceinline__ void run(bool whole, bool last, float4 c[NT]) const {
        constexpr int COUNT = NT <= 4 ? NT : 4;  // tiles of x at a time, where nobody else owns any
        if (SYNC ? division.me == 0 : whole) {
#pragma unroll
            for (int n = 0; n < NT; n += COUNT) finish<COUNT, true>(n, c + n);
            return;
        }
        share_out(c);
        if (SYNC || !last) return;
        if (division.owners == 1)
            finish_kept<COUNT, true>();
        else
            finish_kept<SUMS, false>();
    }
};
