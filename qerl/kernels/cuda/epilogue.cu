// The epilogue of a row of blocks adds other workers' sums, B (A x) and bias, and applies residual or gate.

// Reads the values of `out` that this lane will overwrite.
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

// The gate's activation times up, without the branches of exact division; its relative error is about 2^-22.
__device__ __forceinline__ float gated(const Params& p, float x, float up) {
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * (p.gate[0] + p.gate[1] * x * x)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1 + power));
    return x * inverse * up;
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
        if (p.mode == GATED) {
            const float even = gated(p, c[n].x, c[n].z), odd = gated(p, c[n].y, c[n].w);
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
__device__ __forceinline__ void scale_sums(const Params& p, const Tile& tile, float4 c[X_TILES]) {
    const float low = p.factor[tile.low_part], high = p.factor[tile.high_part];
#pragma unroll
    for (int n = 0; n < X_TILES; n++) c[n].x *= low, c[n].y *= low, c[n].z *= high, c[n].w *= high;
}

// The epilogue for a lane of a warp that has a tile of the row of blocks.
struct Epilogue {
    const Params& p;
    const Share& share;
    const RowSplit& split;
    const Tile& tile;
    LoraOperand& b;  // up to 32 rows of x, the first columns of B
    u64* shrunk;
    const u8* local;  // A x, up to 32 rows of x
    float4* kept;     // this thread block's own sums, in the memory of the stages, which is unused by then
    int place, lane;  // the lane's place among those of all tiles, and in its warp

    // Sends the sums that others own. Those that this thread block owns go into `kept`, so that a loop can take them
    // and their registers are free.
    __device__ __forceinline__ void share_out(const float4 c[X_TILES]) const {
        uint4* mine = split.sums(p, split.me) + place;
        if (!MMA_SYNC && split.me < split.owners) asm volatile("bar.sync 5, %0;" ::"n"(WARPS * 32) : "memory");
#pragma unroll
        for (int n = 0; n < X_TILES; n++)
            if (split.owner(n / SUMS) != split.me)
                send(mine + n * BLOCK_TILES * 32, c[n]);
            else if (!MMA_SYNC)
                kept[n * BLOCK_TILES * 32 + place] = c[n];
    }

    // Adds up COUNT tiles of x from `first` on over all parts, in the parts' order. ONE_OWNER: part 0 adds up all.
    template <int COUNT, bool ONE_OWNER>
    __device__ __forceinline__ void add_sums(int first, float4 c[COUNT]) const {
        constexpr int BATCH = ONE_OWNER ? 8 / COUNT : 8;
        float4 sum[COUNT];
#pragma unroll
        for (int n = 0; n < COUNT; n++) sum[n] = ONE_OWNER ? c[n] : float4{0, 0, 0, 0};
        for (int i = ONE_OWNER; i < split.count; i += BATCH)
            receive<COUNT, BATCH>(
                sum, c, ONE_OWNER ? -1 : split.me - i,
                [&](int part, int n) { return split.sums(p, i + part) + place + (first + n) * BLOCK_TILES * 32; },
                split.count - i);
#pragma unroll
        for (int n = 0; n < COUNT; n++) c[n] = sum[n];
    }

    // Finishes COUNT tiles of x from `first` on.
    template <int COUNT, bool ONE_OWNER>
    __device__ __forceinline__ void finish(int first, float4 c[COUNT]) const {
        const int x_row = share.row_block * ROWS + first * 8;
        u32 before[COUNT][2];
        load_residual<COUNT>(p, tile, x_row, lane, before);
        if (split.count > 1) add_sums<COUNT, ONE_OWNER>(first, c);
        if constexpr (SMALL_BATCH && COHORT == BY_RUNS) {
            add_lora_of_runs<COUNT>(p, share, shrunk, shared_address(local), first, tile, lane, c);
        } else if (SMALL_BATCH && RANK) {
            barrier_wait(shrunk, 0);
            add_lora<COUNT>(p, shared_address(local), first * 8, tile, b, first > 0, lane, c);
        }
        finish_tile<COUNT>(p, tile, x_row, lane, before, c);
    }

    // Finishes the sums that this thread block owns, in a row of which other thread blocks have parts.
    template <int COUNT, bool ONE_OWNER>
    __device__ __forceinline__ void finish_kept() const {
#pragma unroll 1
        for (int first = 0; first < X_TILES; first += COUNT) {
            if (split.owner(first / SUMS) != split.me) continue;
            float4 own[COUNT];
#pragma unroll
            for (int n = 0; n < COUNT; n++) own[n] = kept[(first + n) * BLOCK_TILES * 32 + place];
            finish<COUNT, ONE_OWNER>(first, own);
        }
    }

    // `c`: the sums of this thread block's part.
    __device__ __forceinline__ void run(bool whole, bool last, float4 c[X_TILES]) const {
        constexpr int COUNT = X_TILES <= 4 ? X_TILES : 4;  // tiles of x at a time, where nobody else owns any
        if (MMA_SYNC ? split.me == 0 : whole) {
#pragma unroll
            for (int n = 0; n < X_TILES; n += COUNT) finish<COUNT, true>(n, c + n);
            return;
        }
        share_out(c);
        if (MMA_SYNC || !last) return;
        if (split.owners == 1)
            finish_kept<COUNT, true>();
        else
            finish_kept<SUMS, false>();
    }
};
