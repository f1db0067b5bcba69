// The decode product: out = W x + b + B (A x) for few rows x, with W in 4 bits as `qerl.kernels.tiles` lays it out.
//
// W is cut into blocks of 128 rows and 256 or 128 columns. The sequence of all, row by row, is divided evenly among the
// thread blocks (stream-K); where a row of blocks is divided, the one that has its first block adds up what the others
// computed, in the order of the blocks. That order depends on the shape of W and the number of multiprocessors alone:
// the result is deterministic, and for one NT a row of x gives the same whatever other rows there are.
//
// One warp copies (bulk copies into a ring of stages; weights are prefetched before the kernel that computes x ends),
// eight unpack W in registers and multiply on the tensor cores. Up to 32 rows of x by mma.sync: a warp takes 32 rows of W
// and half of a stage's columns, so that x is read from shared memory four times, not eight. More rows by wgmma, which reads
// x once for 64 rows of W, but takes some 32 cycles longer than its products need.
//
// A x is computed once, by all thread blocks together. With few rows of x a warp of its own computes a share of it; with many,
// shares are stages ahead of W's. The same warp, or three, adds up what all sent; with many rows A x then comes back as a stage
// behind the last of a row of blocks.
//
// Thread blocks hand sums to each other through memory that holds EMPTY, which no sum is, until they are there; the reader
// puts EMPTY back. So data and "it is there" arrive together.
//
// Defined by the compiler's options: NT, tiles of 8 rows of x; STAGES of the ring; REGISTERS of a thread, up to 32 rows.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int WARPS = 8;                        // that multiply: 16 rows of W each
constexpr int SHRINKERS = NT <= 4 ? 1 : 3;      // warps for A x or its sums
constexpr int BLOCK_ROWS = 16 * WARPS, BLOCK_COLUMNS = 128, GROUPS = BLOCK_COLUMNS / 16;
constexpr int STAGE_COLUMNS = NT <= 8 ? 256 : 128;
constexpr int TILE_BYTES = 16 * BLOCK_COLUMNS / 2 + 16 * GROUPS;
constexpr int BLOCK_BYTES = WARPS * TILE_BYTES;
constexpr int WEIGHT_BYTES = STAGE_COLUMNS / BLOCK_COLUMNS * BLOCK_BYTES;
constexpr int SHRINK_ROWS = 32;                 // of A in a stage
constexpr int ROWS = NT * 8;
constexpr int X_PART_BYTES = ROWS * 128;  // 64 columns
constexpr int SHRINK_PART_BYTES = SHRINK_ROWS * 128;
constexpr int EXPAND_TILES = 8, EXPAND_TILE_BYTES = ROWS * 32;  // of A x in a stage; each has 16 rows of A
constexpr int STAGE_BYTES = WEIGHT_BYTES + STAGE_COLUMNS / 64 * X_PART_BYTES;

enum Mode { PLAIN, RESIDUAL, SILU };

constexpr u32 EMPTY = 0xFFFFFFFFu;  // a NaN that no arithmetic makes
constexpr bool FEW = NT <= 4;           // rows of x: mma.sync
constexpr int EXCHANGED = NT < 2 ? NT : 2;  // tiles of rows of x whose sums warps exchange at a time
constexpr int TILES = FEW ? 2 : 1;      // of 16 rows of W that a warp multiplies, with 1 / TILES of a stage's columns

struct alignas(64) TensorMap {
    u8 bytes[128];
};

struct Params {
    TensorMap x_map;        // x as [columns / 64, m, 64], in boxes of a stage's columns and ROWS rows, 128-byte swizzle
    TensorMap a_map;        // of A likewise, SHRINK_ROWS rows
    const u8* weights;
    const u16* x;           // [m, columns]
    u16* out;               // [m, rows], with SILU [m, rows / 2]
    const float* bias;      // [rows] in the order of the tiles, or null
    const u16* lora_a;      // [parts * rank, columns]
    const u16* lora_b[3];   // of each part, [rows of the part, rank]
    u16* shrunk;            // [row blocks][ROWS * parts * rank]: A x, scaled
    uint4* sums;            // [thread blocks][BLOCK_ROWS * ROWS / 4] of divided rows of blocks; EMPTY before and after
    uint4* shrink_sums;     // [row blocks of x][parts * rank / 16][senders][ROWS * 16 / 4]; EMPTY before and after
    int* counters;          // [row blocks of x][2]: what of A x is there, who saw all of it; zero before and after
    float factor[3];        // of each part, multiplies W's products
    float lora_factor[3];   // of each part, multiplies A x
    int part_end[3];        // row behind each part
    int m, rows, columns, rank, parts, mode, scale_multiplier, scale_offset, row_blocks;
    int senders;            // at most, of sums of 16 rows of A
    int span;               // few rows of x: columns of A that a warp takes at a time, in BLOCK_COLUMNS
};

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

__device__ __forceinline__ void barrier_init(u64* barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_wait(u64* barrier, u32 phase) {
    asm volatile(
        "{\n"
        ".reg .pred ready;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared.b64 ready, [%0], %1;\n"
        "@!ready bra again;\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(phase)
        : "memory");
}

__device__ __forceinline__ void bulk_copy(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// A stage's part of x or A from (row, column) on: [columns / 64][rows][64]. Rows that the matrix doesn't have become zero.
__device__ __forceinline__ void tensor_copy(void* to, const TensorMap* map, int column, int row, u64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
            shared_address(to)),
        "l"(map), "r"(0), "r"(row), "r"(column / 64), "r"(shared_address(barrier))
        : "memory");
}

// Everything that earlier kernels wrote is visible after this; before it only what no kernel writes may be read.
__device__ __forceinline__ void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ int load_acquire(const int* pointer) {
    int value;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}

__device__ __forceinline__ void add_release(int* pointer, int value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

__device__ __forceinline__ void send(uint4* to, const float4& v) {
    asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(__float_as_uint(v.x)),
                 "r"(__float_as_uint(v.y)), "r"(__float_as_uint(v.z)), "r"(__float_as_uint(v.w))
                 : "memory");
}

__device__ __forceinline__ uint4 look(const uint4* from) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ void publish(u16* to, u32 value) {
    asm volatile("st.relaxed.gpu.global.b16 [%0], %1;" ::"l"(to), "h"((u16)value) : "memory");
}

__device__ __forceinline__ bool is_empty(const uint4& v) { return v.x == EMPTY || v.y == EMPTY || v.z == EMPTY || v.w == EMPTY; }

// Adds to SUMS sums what up to COUNT others send, in their order. The first's is at `from`, the next sender's `sender_step`
// further, the next sum's `sum_step`; `some` of the senders exist. What isn't there yet is asked for again all at once; with
// 32 rows of x one after the other, which takes fewer registers and was 3 to 5 % faster.
template <int SUMS, int COUNT>
__device__ __forceinline__ void receive(float4* sum, uint4* from, size_t sender_step, size_t sum_step, int some) {
    constexpr bool AT_ONCE = NT != 4;
    uint4 v[COUNT][SUMS];
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int n = 0; n < SUMS; n++) {
            if constexpr (AT_ONCE)
                v[i][n] = {i < some ? EMPTY : 0, 0, 0, 0};
            else
                v[i][n] = look(from + min(i, some - 1) * sender_step + n * sum_step);
        }
    for (bool missing = AT_ONCE; missing;) {
        missing = false;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int n = 0; n < SUMS; n++)
                if (is_empty(v[i][n])) v[i][n] = look(from + i * sender_step + n * sum_step);
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int n = 0; n < SUMS; n++) missing |= is_empty(v[i][n]);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int n = 0; n < SUMS; n++) {
            if (i >= some) continue;
            while (!AT_ONCE && is_empty(v[i][n])) v[i][n] = look(from + i * sender_step + n * sum_step);
            from[i * sender_step + n * sum_step] = uint4{EMPTY, EMPTY, EMPTY, EMPTY};
            sum[n].x += __uint_as_float(v[i][n].x), sum[n].y += __uint_as_float(v[i][n].y);
            sum[n].z += __uint_as_float(v[i][n].z), sum[n].w += __uint_as_float(v[i][n].w);
        }
}

// Another thread block may have written it, so not from L1.
__device__ __forceinline__ uint4 load_once(const uint4* pointer) {
    uint4 v;
    asm volatile("ld.global.cg.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(pointer)
                 : "memory");
    return v;
}

// --- registers ---

__device__ __forceinline__ void multiply_add(float4& c, const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 transpose_matrix(u32 a) {
    u32 d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

__device__ __forceinline__ uint4 load_shared(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ void load_matrices(u32 r[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

#define F4(c) "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
#define F16(i) F4(c[i]), F4(c[i + 1]), F4(c[i + 2]), F4(c[i + 3])
#define D16(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p) \
    "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h ",%" #i ",%" #j ",%" #k ",%" #l ",%" #m ",%" #n ",%" #o ",%" #p
#define WGMMA(n, d, a0, a1, a2, a3, x) \
    "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" d "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #x ", 1, 1, 1, 0;"
#define A_AND_X "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x)
#define D_0 D16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
#define D_16 D16(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31)
#define D_32 D16(32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47)
#define D_48 D16(48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63)
#define D_64 D16(64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79)
#define D_80 D16(80, 81, 82, 83, 84, 85, 86, 87, 88, 89, 90, 91, 92, 93, 94, 95)
#define D_96 D16(96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111)
#define D_112 D16(112, 113, 114, 115, 116, 117, 118, 119, 120, 121, 122, 123, 124, 125, 126, 127)

// c += A x of a warp group: each warp has 16 rows of A in registers, all share x, 16 columns of ROWS rows in shared
// memory. It runs on; a and c must not be touched before `wait_for_products`.
__device__ __forceinline__ void multiply_add_shared(float4 c[NT], const u32 a[4], u64 x) {
#if NT == 8
    asm volatile(WGMMA(64, D_0 "," D_16, 32, 33, 34, 35, 36) : F16(0), F16(4) : A_AND_X);
#elif NT == 16
    asm volatile(WGMMA(128, D_0 "," D_16 "," D_32 "," D_48, 64, 65, 66, 67, 68)
                 : F16(0), F16(4), F16(8), F16(12)
                 : A_AND_X);
#elif NT == 32
    asm volatile(WGMMA(256, D_0 "," D_16 "," D_32 "," D_48 "," D_64 "," D_80 "," D_96 "," D_112, 128, 129, 130, 131, 132)
                 : F16(0), F16(4), F16(8), F16(12), F16(16), F16(20), F16(24), F16(28)
                 : A_AND_X);
#endif
}

#define WGMMA_A_SHARED(n, d, a, x) \
    "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" d "}, %" #a ", %" #x ", 1, 1, 1, 0, 0;"

// The same with 64 rows of A in shared memory.
__device__ __forceinline__ void multiply_add_both_shared(float4 c[NT], u64 a, u64 x) {
#if NT == 8
    asm volatile(WGMMA_A_SHARED(64, D_0 "," D_16, 32, 33) : F16(0), F16(4) : "l"(a), "l"(x));
#elif NT == 16
    asm volatile(WGMMA_A_SHARED(128, D_0 "," D_16 "," D_32 "," D_48, 64, 65)
                 : F16(0), F16(4), F16(8), F16(12)
                 : "l"(a), "l"(x));
#elif NT == 32
    asm volatile(WGMMA_A_SHARED(256, D_0 "," D_16 "," D_32 "," D_48 "," D_64 "," D_80 "," D_96 "," D_112, 128, 129)
                 : F16(0), F16(4), F16(8), F16(12), F16(16), F16(20), F16(24), F16(28)
                 : "l"(a), "l"(x));
#endif
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// All but the last `PENDING` committed groups have ended.
template <int PENDING>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Where 16 columns of x or A are: rows of 128 bytes, groups of 8 rows 1,024 bytes apart, 128-byte swizzle.
__device__ __forceinline__ u64 matrix_descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

__device__ __forceinline__ u32 multiply_bf16x2(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

__device__ __forceinline__ float low_float(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

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

// --- division of the work ---

// Units 0 to `units` - 1 go to workers in their order, as evenly as can be. The unit that a worker begins with:
__device__ __forceinline__ int first_unit(int units, int workers, int worker) { return (int)((u32)units * worker / workers); }

// Whose unit it is, where there are at least as many units as workers.
__device__ __forceinline__ int worker_of(int units, int workers, int unit) { return (int)(((u32)(unit + 1) * workers - 1) / units); }

// The same for A with many rows of x: units are blocks of SHRINK_ROWS x STAGE_COLUMNS.
struct ShrinkUnits {
    int units, workers;

    __device__ __forceinline__ ShrinkUnits(const Params& p, int all_workers) {
        units = FEW ? 0 : (p.parts * p.rank + SHRINK_ROWS - 1) / SHRINK_ROWS * (p.columns / STAGE_COLUMNS);
        workers = min(all_workers, units);
    }
    __device__ __forceinline__ int start(int w) const { return units ? first_unit(units, workers, min(w, workers)) : 0; }
    __device__ __forceinline__ int sender(int unit) const { return worker_of(units, workers, unit); }
};

// What a thread block has to do, stage by stage: with many rows of x units of A, then of W, BLOCK_ROWS x STAGE_COLUMNS.
struct Share {
    int worker, workers, row_block, column_blocks;
    int first_shrink, shrinks, first, last;

    __device__ Share(const Params& p) {
        row_block = blockIdx.x % p.row_blocks;
        worker = blockIdx.x / p.row_blocks;
        workers = gridDim.x / p.row_blocks;
        column_blocks = p.columns / STAGE_COLUMNS;
        first = start(p, worker), last = start(p, worker + 1);
        const ShrinkUnits a(p, workers);
        first_shrink = a.start(worker), shrinks = a.start(worker + 1) - first_shrink;
    }
    __device__ __forceinline__ int stages() const { return shrinks + last - first; }
    __device__ __forceinline__ int unit(int stage) const {
        return stage < shrinks ? first_shrink + stage : first + stage - shrinks;
    }
    // Stages of A count as stages of W do: who has more of them has fewer of W's. As there are twice as many of W's as
    // workers, or one worker, everyone has one of W's.
    __device__ int start(const Params& p, int w) const {
        const int units = (p.rows + BLOCK_ROWS - 1) / BLOCK_ROWS * column_blocks;
        const ShrinkUnits a(p, workers);
        return first_unit(units + a.units, workers, w) - a.start(w);
    }
};

__device__ __forceinline__ int part_of(const Params& p, int row) { return (row >= p.part_end[0]) + (row >= p.part_end[1]); }

// The tiles of A x that a row of blocks needs, where they come as stages: those of all its parts.
struct Expansion {
    int first, tiles;

    __device__ __forceinline__ Expansion(const Params& p, int row) {
        const int per_part = p.rank / 16, low = p.mode == SILU ? 0 : part_of(p, row * BLOCK_ROWS);
        const int high = p.mode == SILU ? 1 : part_of(p, min((row + 1) * BLOCK_ROWS, p.rows) - 1);
        first = low * per_part, tiles = FEW ? 0 : (high + 1 - low) * per_part;
    }
    __device__ __forceinline__ int stages() const { return (tiles + EXPAND_TILES - 1) / EXPAND_TILES; }
};

// The stages in their order, as one thread copies them: without divisions a step.
struct Walk {
    int i, row, column, expansion;  // unit and, if not 0, the number of the stage of A x behind it

    __device__ __forceinline__ explicit Walk(const Share& share) : i(0), expansion(0) { enter(share); }
    __device__ __forceinline__ void enter(const Share& share) {
        row = share.unit(i) / share.column_blocks, column = share.unit(i) % share.column_blocks;
    }
    __device__ __forceinline__ void advance(const Params& p, const Share& share) {
        const bool ends = i >= share.shrinks && (column + 1 == share.column_blocks || i + 1 == share.stages());
        if (!FEW && p.rank && ends && row * share.column_blocks >= share.first && expansion < Expansion(p, row).stages()) {
            expansion++;
            return;
        }
        expansion = 0, i++, column++;
        if (i == share.shrinks) enter(share);
        if (column == share.column_blocks) column = 0, row++;
    }
};

// --- copies ---

__device__ __forceinline__ void copy_weights(const Params& p, int unit, u8* stage, u64* full) {
    barrier_expect(full, STAGE_BYTES);
    bulk_copy(stage, p.weights + (size_t)unit * WEIGHT_BYTES, WEIGHT_BYTES, full);
}

__device__ __forceinline__ void copy_shrink(const Params& p, const Walk& at, u8* stage, u64* full) {
    barrier_expect(full, STAGE_COLUMNS / 64 * (SHRINK_PART_BYTES + X_PART_BYTES));
    tensor_copy(stage, &p.a_map, at.column * STAGE_COLUMNS, at.row * SHRINK_ROWS, full);
}

__device__ __forceinline__ void copy_shrunk(const Params& p, const Share& share, const Walk& at, u8* stage, u64* full) {
    const Expansion expansion(p, at.row);
    const int first = (at.expansion - 1) * EXPAND_TILES, tiles = min(expansion.tiles - first, EXPAND_TILES);
    const u8* from = (const u8*)p.shrunk + ((size_t)share.row_block * p.parts * p.rank / 16 + expansion.first + first) * EXPAND_TILE_BYTES;
    barrier_expect(full, tiles * EXPAND_TILE_BYTES);
    bulk_copy(stage + WEIGHT_BYTES, from, tiles * EXPAND_TILE_BYTES, full);
}

// One thread.
__device__ void copy(const Params& p, const Share& share, u8* stages, u64* full, u64* empty, u64* shrunk) {
    const auto copy_constants = [&](const Walk& at, int stage) {
        u8* to = stages + stage * STAGE_BYTES;
        if (at.i < share.shrinks)
            copy_shrink(p, at, to, full + stage);
        else
            copy_weights(p, share.unit(at.i), to, full + stage);
    };
    int early = 0;
    for (Walk at(share); early < STAGES && at.i < share.stages() && !at.expansion; early++, at.advance(p, share))
        copy_constants(at, early);
    asm volatile("prefetch.tensormap [%0];" ::"l"(&p.x_map) : "memory");
    wait_for_earlier_kernels();
    int stage = 0, round = 0;
    for (Walk at(share); at.i < share.stages(); at.advance(p, share)) {
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

// 16 columns of x, or 32 with one tile of rows, from `chunk` of 8 columns on, as operands; `x` is where this lane reads.
__device__ __forceinline__ void load_x(u32 x, int chunk, int lane, u32 b[NT == 4 ? 8 : 4]) {
    // ldmatrix: lanes 8i to 8i + 7 give the rows of matrix i; the four are 8 columns each of one tile of rows, or two each
    // of two tiles. The copy has swizzled the 16-byte chunks of a row by its number.
    const u32 swizzled = ((chunk + (NT == 1 ? lane / 8 : lane / 8 % 2)) ^ lane % 8) * 16;
#pragma unroll
    for (int i = 0; i < (NT == 4 ? 2 : 1); i++) load_matrices(b + 4 * i, x + i * 16 * 128 + swizzled);
}

// --- A x ---

// Where a thread block's sums of a tile of 16 rows of A go.
__device__ __forceinline__ uint4* shrink_sums(const Params& p, const Share& share, int tile, int sender) {
    const int tiles = p.parts * p.rank / 16;
    return p.shrink_sums + (((size_t)share.row_block * tiles + tile) * p.senders + sender) * NT * 32;
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

    __device__ __forceinline__ void multiply(const Params& p, int x_row, int column, float4 c[NT]) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < NT; n++) {
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

// Few rows of x: a warp takes 16 rows of A and a span of columns at a time.
__device__ void shrink_few(const Params& p, const Share& share, int lane) {
    const int blocks = p.columns / BLOCK_COLUMNS, items = p.parts * p.rank / 16 * p.senders;
    ShrinkOperand a;
    if (share.worker < items) a.load(p, share.worker / p.senders, share.worker % p.senders * p.span * BLOCK_COLUMNS);
    wait_for_earlier_kernels();
    for (int item = share.worker; item < items; item += share.workers) {
        const int tile = item / p.senders, sender = item % p.senders;
        const int begin = sender * p.span, end = min(begin + p.span, blocks);
        float4 c[NT] = {};
        for (int block = begin; block < end; block++) {
            if (item != share.worker || block != begin) a.load(p, tile, block * BLOCK_COLUMNS);
            a.multiply(p, share.row_block * ROWS, block * BLOCK_COLUMNS, c);
        }
        uint4* sums = shrink_sums(p, share, tile, sender);
#pragma unroll
        for (int n = 0; n < NT; n++) send(sums + n * 32 + lane, c[n]);
    }
}

// A stage of A x for many rows of x: each group of four warps takes half of the columns. Of the 64 rows of A that it reads those behind
// SHRINK_ROWS are something else, and so are their sums.
__device__ __forceinline__ void shrink_many(u32 stage, int warp, float4 c[NT]) {
    constexpr int PARTS = STAGE_COLUMNS / 64 / 2;
    const u64 a = matrix_descriptor(stage + warp / 4 * PARTS * SHRINK_PART_BYTES);
    const u64 x = matrix_descriptor(stage + WEIGHT_BYTES + warp / 4 * PARTS * X_PART_BYTES);
    begin_products();
#pragma unroll
    for (int k = 0; k < PARTS * 4; k++)
        multiply_add_both_shared(c, a + (k / 4 * SHRINK_PART_BYTES + k % 4 * 32) / 16, x + (k / 4 * X_PART_BYTES + k % 4 * 32) / 16);
    commit_products();
    wait_for_products<0>();
}

// Sends the sums of a thread block's stages of 32 rows of A; `row` counts those.
__device__ __forceinline__ void leave_shrink_sums(const Params& p, const Share& share, int row, int warp, int lane, const float4 c[NT]) {
    const ShrinkUnits units(p, share.workers);
    const int tile = row * (SHRINK_ROWS / 16) + warp % 4, sender = share.worker - units.sender(row * share.column_blocks);
    if (warp % 4 >= SHRINK_ROWS / 16 || tile >= p.parts * p.rank / 16) return;
    uint4* sums = shrink_sums(p, share, tile, 2 * sender + warp / 4) + lane;
#pragma unroll
    for (int n = 0; n < NT; n++) send(sums + n * 32, c[n]);
}

// Where A x of a row of this row block and of row `a` of a tile of A goes. With many rows of x tiles lie as products read
// them: rows of 32 bytes, whose halves are swapped in every other four rows, columns in the order of `LoraOperand`.
__device__ __forceinline__ u16* shrunk_place(const Params& p, const Share& share, int row, int tile, int a) {
    const int width = p.parts * p.rank;
    u16* block = p.shrunk + (size_t)share.row_block * ROWS * width;
    if constexpr (FEW) return block + row * width + tile * 16 + a;
    const int half = a / 2 % 2 ^ row / 4 % 2;
    return block + tile * ROWS * 16 + row * 16 + half * 8 + a / 4 * 2 + a % 2;
}

// Senders whose sums the lanes of a warp read at the same time, so many of them as fit into registers at a time.
constexpr int SENDER_GROUPS = NT <= 2 ? 4 : FEW ? 1 : 2, SENDERS_AT_A_TIME = NT <= 2 ? 10 : 8;
constexpr int SUM_LANES = 32 / SENDER_GROUPS;

// Adds up A x, in the senders' order; the sums are shared out among all warps that do.
__device__ __forceinline__ void share_sums(const Params& p, const Share& share, int number, int lane) {
    const ShrinkUnits units(p, share.workers);
    const int group = lane / SUM_LANES, g = lane % SUM_LANES;
    for (int item = number * share.workers + share.worker; item < p.parts * p.rank / 16 * NT * SENDER_GROUPS;
         item += SHRINKERS * share.workers) {
        const int tile = item / SENDER_GROUPS / NT, n = item / SENDER_GROUPS % NT;
        const int place = item % SENDER_GROUPS * SUM_LANES + g;  // the lane whose sums these are
        int senders = p.senders;
        if constexpr (!FEW) {
            const int unit = tile / (SHRINK_ROWS / 16) * share.column_blocks;
            senders = 2 * (units.sender(unit + share.column_blocks - 1) - units.sender(unit) + 1);
        }
        uint4* from = shrink_sums(p, share, tile, group) + n * 32 + place;
        const size_t step = (size_t)NT * 32 * SENDER_GROUPS;
        float4 c = {0, 0, 0, 0};
        for (int s = group; s < senders; s += SENDERS_AT_A_TIME * SENDER_GROUPS, from += SENDERS_AT_A_TIME * step)
            receive<1, SENDERS_AT_A_TIME>(&c, from, step, 0, (senders - s + SENDER_GROUPS - 1) / SENDER_GROUPS);
        __syncwarp();
#pragma unroll
        for (int other = SUM_LANES; other < 32; other *= 2) {
            c.x += __shfl_xor_sync(~0u, c.x, other), c.y += __shfl_xor_sync(~0u, c.y, other);
            c.z += __shfl_xor_sync(~0u, c.z, other), c.w += __shfl_xor_sync(~0u, c.w, other);
        }
        // A's rows g (x, y) and g + 8 (z, w), rows 2t (x, z) and 2t + 1 (y, w) of x.
        const int row = n * 8 + place % 4 * 2, rows = p.m - share.row_block * ROWS;
        const float factor = p.lora_factor[tile * 16 / p.rank];
        const u32 even = to_bf16x2(c.x * factor, c.z * factor), odd = to_bf16x2(c.y * factor, c.w * factor);
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

// Until all of A x has been counted. One thread of a thread block.
__device__ void wait_for_shrunk(const Params& p, const Share& share, u64* shrunk) {
    int* counters = p.counters + 2 * share.row_block;
    while (load_acquire(counters) != p.parts * p.rank / 16 * NT * SENDER_GROUPS) {}
    barrier_arrive(shrunk);
    // Who is the last to have seen it prepares it for the next launch.
    if (atomicAdd(counters + 1, 1) == share.workers - 1) counters[0] = counters[1] = 0;
}

// What the warps for A x do; they tell the others by `shrunk` that it is there.
__device__ void shrink(const Params& p, const Share& share, u64* shrunk, int number, int lane) {
    if constexpr (FEW)
        shrink_few(p, share, lane);
    else
        wait_for_earlier_kernels();
    share_sums(p, share, number, lane);
    if (number == 0 && lane == 0) wait_for_shrunk(p, share, shrunk);
}

// --- W x ---

__device__ __forceinline__ void unpack_group(const Params& p, const uint4& words, const uint4& scales, int half, int j, u32 a[4]) {
    const u32 low = scale_pair(half ? scales.y : scales.x, j % 2, p), high = scale_pair(half ? scales.w : scales.z, j % 2, p);
    unpack(component(words, j), twice(low, j / 2), twice(high, j / 2), a);
}

// Few rows of x: each warp reads them into registers.
__device__ __forceinline__ void multiply_few(const Params& p, u32 stage, int warp, int lane, float4 c[TILES][NT]) {
    const int block = warp / 4;
    const u32 tiles = stage + block * BLOCK_BYTES + warp % 4 * 2 * TILE_BYTES;
    const u32 x = stage + WEIGHT_BYTES + block * 2 * X_PART_BYTES + ((NT == 1 ? 0 : lane / 16 * 8) + lane % 8) * 128;
    uint4 scales[TILES];
#pragma unroll
    for (int r = 0; r < TILES; r++) scales[r] = load_shared(tiles + r * TILE_BYTES + 1024 + lane / 4 * 16);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 words[TILES];
#pragma unroll
        for (int r = 0; r < TILES; r++) words[r] = load_shared(tiles + r * TILE_BYTES + half * 512 + lane * 16);
        u32 b[NT == 4 ? 8 : 4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (NT > 1 || j % 2 == 0) load_x(x + half * X_PART_BYTES, 2 * j, lane, b);
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

// Which of a block's 16-row tiles a warp has after `exchange_tiles`.
__device__ __forceinline__ int tile_of(int warp) { return FEW ? warp % 4 * 2 + warp / 4 : warp; }


// The two warps that have halves of the columns of the same two tiles give each other one tile's sums.
__device__ __forceinline__ void exchange_tiles(float4* memory, int warp, int lane, float4 c[TILES][NT]) {
    const bool second = warp / 4;
    float4 *mine = memory + warp * EXCHANGED * 32 + lane, *others = memory + (warp ^ 4) * EXCHANGED * 32 + lane;
#pragma unroll
    for (int first = 0; first < NT; first += EXCHANGED) {
#pragma unroll
        for (int n = first; n < first + EXCHANGED; n++) mine[(n - first) * 32] = second ? c[0][n] : c[TILES - 1][n];
        asm volatile("bar.sync %0, 64;" ::"r"(1 + warp % 4) : "memory");
#pragma unroll
        for (int n = first; n < first + EXCHANGED; n++) {
            const float4 own = second ? c[TILES - 1][n] : c[0][n], other = others[(n - first) * 32];
            c[0][n] = {own.x + other.x, own.y + other.y, own.z + other.z, own.w + other.w};
        }
        asm volatile("bar.sync %0, 64;" ::"r"(1 + warp % 4) : "memory");
    }
}

// Sums of a divided row of blocks, for the thread block that has its first block.
__device__ void leave_sums(const Params& p, const float4 c[NT]) {
    uint4* mine = p.sums + (size_t)blockIdx.x * BLOCK_ROWS * ROWS / 4;
#pragma unroll
    for (int n = 0; n < NT; n++) send(mine + n * WARPS * 32 + threadIdx.x, c[n]);
}

__device__ void add_sums(const Params& p, const Share& share, int end, float4 c[NT]) {
    constexpr int SUMS = NT <= 4 ? NT : 4, BATCH = 8 / SUMS;
    const size_t step = (size_t)p.row_blocks * BLOCK_ROWS * ROWS / 4;
    uint4* from = p.sums + (size_t)blockIdx.x * BLOCK_ROWS * ROWS / 4 + threadIdx.x;
    int peers = 0;
    while (share.start(p, share.worker + 1 + peers) < end) peers++;
    for (int peer = 0; peer < peers; peer += BATCH)
#pragma unroll
        for (int n = 0; n < NT; n += SUMS)
            receive<SUMS, BATCH>(c + n, from + (peer + 1) * step + n * WARPS * 32, step, WARPS * 32, peers - peer);
}

// Where a tile's rows stand in the layers, and what is read before their sums are there.
struct Tile {
    int row, low_part, high_part;  // with SILU a tile has 8 rows of gate and then 8 of up, otherwise all are of one part
    const u16 *b_low, *b_high;     // of B, at this lane's place
    float low_bias, high_bias;

    __device__ Tile(const Params& p, int row, int lane) : row(row) {
        const int g = lane / 4;
        low_part = p.mode == SILU ? 0 : part_of(p, row), high_part = p.mode == SILU ? 1 : low_part;
        const int in_part = p.mode == SILU ? row / 2 : row - (low_part ? p.part_end[low_part - 1] : 0);
        b_low = p.lora_b[low_part] + (size_t)(in_part + g) * p.rank;
        b_high = p.lora_b[high_part] + (size_t)(in_part + g + (p.mode == SILU ? 0 : 8)) * p.rank;
        const bool biased = p.bias && row < p.rows;
        low_bias = biased ? p.bias[row + g] : 0, high_bias = biased ? p.bias[row + g + 8] : 0;
    }

    // Its part of B on its way to L2.
    __device__ __forceinline__ void prefetch_b(const Params& p, int lane) const {
        if (row >= p.rows) return;
        for (int column = lane % 4 * 64; column < p.rank; column += 256) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(b_low + column));
            asm volatile("prefetch.global.L2 [%0];" ::"l"(b_high + column));
        }
    }
};

constexpr int RANKS_AT_A_TIME = NT <= 2 ? 4 : FEW ? 1 : EXPAND_TILES;  // tiles of 16, whose operands are in registers

// Tiles of 16 columns of B, as operands for A x: lane t of a quad has four in a row, in place of those that the operand's
// definition gives it.
struct LoraOperand {
    uint2 low[RANKS_AT_A_TIME], high[RANKS_AT_A_TIME];

    // From column `first` on, of the parts of both halves of the rows.
    __device__ __forceinline__ void load(const Params& p, const Tile& tile, int first, int lane) {
        if (tile.row >= p.rows) return;
#pragma unroll
        for (int j = 0; j < RANKS_AT_A_TIME; j++) {
            const int column = min(first + j * 16, p.rank - 16) + lane % 4 * 4;
            low[j] = *(const uint2*)(tile.b_low + column), high[j] = *(const uint2*)(tile.b_high + column);
        }
    }
    // From the `first` of all parts' tiles on, one behind the other; those of other parts than the rows' are zero.
    __device__ __forceinline__ void load_tiles(const Params& p, const Tile& tile, int first, int tiles, int lane) {
        const int per_part = p.rank / 16;
#pragma unroll
        for (int j = 0; j < RANKS_AT_A_TIME; j++) {
            low[j] = high[j] = {0, 0};
            if (j >= tiles || tile.row >= p.rows) continue;
            const int part = (first + j) / per_part, column = (first + j) % per_part * 16 + lane % 4 * 4;
            if (part == tile.low_part) low[j] = *(const uint2*)(tile.b_low + column);
            if (part == tile.high_part) high[j] = *(const uint2*)(tile.b_high + column);
        }
    }
};

// B (A x) for few rows of x. The first columns of B are there already.
__device__ __forceinline__ void add_lora(const Params& p, const Share& share, const Tile& tile, LoraOperand& b, int lane, float4 c[NT]) {
    if (tile.row >= p.rows) return;
    const int width = p.parts * p.rank;
    const u16* shrunk = p.shrunk + (size_t)(share.row_block * ROWS + lane / 4) * width + lane % 4 * 4;
    for (int first = 0; first < p.rank; first += RANKS_AT_A_TIME * 16) {
        if (first) b.load(p, tile, first, lane);
        for (int part = tile.low_part; part <= tile.high_part; part++) {
            const bool low = part == tile.low_part, high = part == tile.high_part;
            uint2 v[RANKS_AT_A_TIME][NT];
#pragma unroll
            for (int j = 0; j < RANKS_AT_A_TIME; j++)
#pragma unroll
                for (int n = 0; n < NT; n++)
                    v[j][n] = *(const uint2*)(shrunk + n * 8 * width + part * p.rank + min(first + j * 16, p.rank - 16));
#pragma unroll
            for (int j = 0; j < RANKS_AT_A_TIME; j++) {
                if (first + j * 16 >= p.rank) break;
                const u32 a[4] = {low ? b.low[j].x : 0, high ? b.high[j].x : 0, low ? b.low[j].y : 0, high ? b.high[j].y : 0};
#pragma unroll
                for (int n = 0; n < NT; n++) multiply_add(c[n], a, v[j][n].x, v[j][n].y);
            }
        }
    }
}

// Where a tile of A x is in a stage: rows of 32 bytes, groups of 8 rows 256 bytes apart, 32-byte swizzle.
__device__ __forceinline__ u64 shrunk_descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(256 >> 4) << 32 | (u64)3 << 62;
}

// COUNT tiles from shared memory, of which `tiles` exist; B is zero for the others.
template <int COUNT>
__device__ __forceinline__ void multiply_shrunk(const LoraOperand& b, u32 x, int tiles, float4 c[NT]) {
    begin_products();
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        const u32 a[4] = {b.low[j].x, b.high[j].x, b.low[j].y, b.high[j].y};
        multiply_add_shared(c, a, shrunk_descriptor(x + (j < tiles ? j : 0) * EXPAND_TILE_BYTES));
    }
    commit_products();
    wait_for_products<0>();
}

// The same for many rows of x: tiles of A x come as stages.
__device__ __forceinline__ void add_lora_stages(const Params& p, const Tile& tile, int row, u8* stages, u64* full, u64* empty, int& i,
                                                int lane, LoraOperand& b, float4 c[NT]) {
    const Expansion expansion(p, row);
    for (int first = 0; first < expansion.tiles; first += EXPAND_TILES, i++) {
        const int stage = i % STAGES, tiles = min(expansion.tiles - first, EXPAND_TILES);
        if (first) b.load_tiles(p, tile, expansion.first + first, tiles, lane);
        barrier_wait(full + stage, (i / STAGES) & 1);
        const u32 x = shared_address(stages + stage * STAGE_BYTES + WEIGHT_BYTES);
        if (tiles <= 2)
            multiply_shrunk<2>(b, x, tiles, c);
        else if (tiles <= 4)
            multiply_shrunk<4>(b, x, tiles, c);
        else
            multiply_shrunk<EXPAND_TILES>(b, x, tiles, c);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + stage);
    }
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

__device__ void finish_tile(const Params& p, const Tile& tile, int first_x_row, int lane, const u32 before[NT][2], float4 c[NT]) {
    if (tile.row >= p.rows) return;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        c[n].x += tile.low_bias, c[n].y += tile.low_bias, c[n].z += tile.high_bias, c[n].w += tile.high_bias;
        const int x_row = first_x_row + n * 8 + g;
        if (p.mode == SILU) {
            const float even = c[n].x / (1 + __expf(-c[n].x)) * c[n].z, odd = c[n].y / (1 + __expf(-c[n].y)) * c[n].w;
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

// The end of a row of blocks, behind `i` stages; `b` holds the first of B with few rows of x.
__device__ __forceinline__ void finish(const Params& p, const Share& share, int row, bool divided, u8* stages, u64* full, u64* empty,
                                       int& i, u64* shrunk, const Tile& tile, LoraOperand& b, int lane, float4 c[NT]) {
    const int first_x_row = share.row_block * ROWS;
    u32 before[NT][2];
    if constexpr (FEW) load_residual(p, tile, first_x_row, lane, before);
    // A x is there last: the others' sums come first.
    if (divided) add_sums(p, share, (row + 1) * share.column_blocks, c);
    scale_sums(p, tile, c);
    if (FEW && p.rank) {
        barrier_wait(shrunk, 0);
        add_lora(p, share, tile, b, lane, c);
    }
    if (!FEW && p.rank) {
        const Expansion expansion(p, row);
        b.load_tiles(p, tile, expansion.first, expansion.tiles, lane);
        add_lora_stages(p, tile, row, stages, full, empty, i, lane, b, c);
    }
    if constexpr (!FEW) load_residual(p, tile, first_x_row, lane, before);
    finish_tile(p, tile, first_x_row, lane, before, c);
}

__device__ void multiply(const Params& p, const Share& share, u8* stages, u64* full, u64* empty, u64* shrunk, int warp,
                         int lane) {
    float4* exchanged = (float4*)(stages + STAGES * STAGE_BYTES);
    // Before its first read of what earlier kernels wrote, every thread must have waited; x is waited for by its copier.
    wait_for_earlier_kernels();
    for (int done = 0, i = 0; done < share.stages();) {
        const bool of_a = !FEW && done < share.shrinks;
        const int begin = share.unit(done), row = begin / share.column_blocks, end = (row + 1) * share.column_blocks;
        const int last = min(done + end - begin, of_a ? share.shrinks : share.stages());
        const bool divided = last - done < end - begin;
        const bool finishes = !of_a && begin % share.column_blocks == 0;
        // B takes as long as a stage: with few rows of x it waits in registers, or in L2 as far as they don't suffice.
        LoraOperand b;
        if (p.rank && finishes) {
            const Tile tile(p, row * BLOCK_ROWS + tile_of(warp) * 16, lane);
            if (FEW) b.load(p, tile, 0, lane);
            if (!FEW || p.rank > RANKS_AT_A_TIME * 16) tile.prefetch_b(p, lane);
        }
        float4 c[TILES][NT] = {};
        for (; done < last; done++, i++) {
            const int stage = i % STAGES;
            barrier_wait(full + stage, (i / STAGES) & 1);
            const u32 address = shared_address(stages + stage * STAGE_BYTES);
            if constexpr (FEW)
                multiply_few(p, address, warp, lane, c);
            else if (of_a)
                shrink_many(address, warp, c[0]);
            else
                multiply_many(p, address, warp, lane, c[0]);
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + stage);
        }
        if (of_a) {
            leave_shrink_sums(p, share, row, warp, lane, c[0]);
            continue;
        }
        if constexpr (FEW) exchange_tiles(exchanged, warp, lane, c);
        if (!finishes) {
            leave_sums(p, c[0]);
            continue;
        }
        const Tile tile(p, row * BLOCK_ROWS + tile_of(warp) * 16, lane);
        finish(p, share, row, divided, stages, full, empty, i, shrunk, tile, b, lane, c[0]);
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
    __shared__ u64 full[STAGES], empty[STAGES], shrunk;
    u8* stages = unaligned + (-shared_address(unaligned) & 1023);  // what swizzled copies need
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Share share(p);
    if (threadIdx.x == 0) {
        barrier_init(&shrunk, 1);
        for (int i = 0; i < STAGES; i++) barrier_init(full + i, 1), barrier_init(empty + i, WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_kernel_start();
    if (warp < WARPS) {
        if (PASS_REGISTERS) asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
        multiply(p, share, stages, full, empty, &shrunk, warp, lane);
    } else {
        if (PASS_REGISTERS) asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
        if (warp == WARPS && lane == 0) copy(p, share, stages, full, empty, &shrunk);
        if (warp > WARPS && p.rank) shrink(p, share, &shrunk, warp - WARPS - 1, lane);
    }
}
