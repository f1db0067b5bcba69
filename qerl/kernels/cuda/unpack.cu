// The weight of one layer, bfloat16 and row-major, from the layout of `qerl.kernels.tiles`: for cuBLAS, in training.
// A warp unpacks a tile of 16 rows and 128 columns in shared memory and writes it in rows of 256 bytes.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

constexpr int WARPS = 8, TILE_BYTES = 1152, BLOCK_TILES = 8, PITCH = 272;

struct Params {
    const u8* weights;
    u16* out;         // [rows of the layer, columns]
    float divisor;    // weight = code * (scale / divisor), rounded to float32, then to bfloat16
    int first_tile;   // of the layer
    int tiles;        // of 16 rows that hold rows of the layer
    int column_blocks;
    int interleaved;  // -1, or which 8 rows of each tile are the layer's
    int scale_multiplier, scale_offset;
};

__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// Two codes, as bfloat16 times 2^-126, to weights.
__device__ __forceinline__ u32 weights_of(u32 codes, float scale) {
    const float low = __uint_as_float(codes << 16) * 0x1p126f, high = __uint_as_float(codes & 0xFFFF0000u) * 0x1p126f;
    return to_bf16x2(low * scale, high * scale);
}

__device__ __forceinline__ float scale_of(u8 byte, const Params& p) {
    const u32 bits = (byte * p.scale_multiplier + p.scale_offset) & 0xFFFF;
    return __fdiv_rn(__uint_as_float(bits << 16) * 0x1p-118f, p.divisor);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) unpack(const __grid_constant__ Params p) {
    __shared__ __align__(16) u8 rows[WARPS][16 * PITCH];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    const int number = blockIdx.x * WARPS + warp, block = number % p.column_blocks;
    if (number / p.column_blocks >= p.tiles) return;
    const int row_tile = p.first_tile + number / p.column_blocks;
    const u8* tile = p.weights + (((size_t)(row_tile / BLOCK_TILES) * p.column_blocks + block) * BLOCK_TILES +
                                  row_tile % BLOCK_TILES) * TILE_BYTES;
    for (int half = 0; half < 2; half++) {
        const uint4 words = *(const uint4*)(tile + half * 512 + lane * 16);
        for (int j = 0; j < 4; j++) {
            const u32 word = j == 0 ? words.x : j == 1 ? words.y : j == 2 ? words.z : words.w, mask = 0x81C081C0u;
            const int group = half * 4 + j;
            const float low = scale_of(tile[1024 + g * 16 + group], p), high = scale_of(tile[1024 + g * 16 + 8 + group], p);
            const u32 fourth = ((word << 6) & 0x80C080C0u) | ((word >> 2) & 0x01000100u);
            u8* out = rows[warp] + g * PITCH + group * 32 + t * 4;
            *(u32*)out = weights_of(word & mask, low);
            *(u32*)(out + 8 * PITCH) = weights_of(__funnelshift_r(word, word, 6) & mask, high);
            *(u32*)(out + 16) = weights_of((word << 4) & mask, low);
            *(u32*)(out + 8 * PITCH + 16) = weights_of(fourth, high);
        }
    }
    __syncwarp();
    const size_t columns = (size_t)p.column_blocks * 128;
    for (int i = lane; i < 16 * 16; i += 32) {
        const int row = i / 16;
        if (p.interleaved >= 0 && row / 8 != p.interleaved) continue;
        const size_t out_row = p.interleaved < 0 ? (size_t)(row_tile - p.first_tile) * 16 + row : (size_t)row_tile * 8 + row % 8;
        *(uint4*)(p.out + out_row * columns + block * 128 + i % 16 * 8) = *(const uint4*)(rows[warp] + row * PITCH + i % 16 * 16);
    }
}
