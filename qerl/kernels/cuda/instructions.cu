// Hopper's instructions as functions, and the exchange of data between thread blocks.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {
    u8 bytes[128];
};

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

__device__ __forceinline__ void barrier_init(u64* barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives by a predicate: the compiler allows no branch while products run.
__device__ __forceinline__ void barrier_arrive_if(u32 barrier, bool condition) {
    asm volatile(
        "{\n"
        ".reg .pred arrives;\n"
        "setp.ne.b32 arrives, %1, 0;\n"
        "@arrives mbarrier.arrive.shared.b64 _, [%0];\n"
        "}\n" ::"r"(barrier),
        "r"((u32)condition)
        : "memory");
}

// The same at a barrier of another thread block of the cluster.
__device__ __forceinline__ void barrier_arrive_remote_if(u32 barrier, bool condition) {
    asm volatile(
        "{\n"
        ".reg .pred arrives;\n"
        "setp.ne.b32 arrives, %1, 0;\n"
        "@arrives mbarrier.arrive.shared::cluster.b64 _, [%0];\n"
        "}\n" ::"r"(barrier),
        "r"((u32)condition)
        : "memory");
}

// Where the other thread block of a cluster of two has what is at `address` here.
__device__ __forceinline__ u32 of_other(u32 address) {
    u32 other;
    asm volatile(
        "{\n"
        ".reg .b32 rank;\n"
        "mov.u32 rank, %%cluster_ctarank;\n"
        "xor.b32 rank, rank, 1;\n"
        "mapa.shared::cluster.u32 %0, %1, rank;\n"
        "}\n"
        : "=r"(other)
        : "r"(address));
    return other;
}

// Waits until all threads of the cluster have come here.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u64* barrier) { barrier_arrive(shared_address(barrier)); }

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 phase) {
    asm volatile(
        "{\n"
        ".reg .pred ready;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared.b64 ready, [%0], %1;\n"
        "@!ready bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(phase)
        : "memory");
}

__device__ __forceinline__ void barrier_wait(u64* barrier, u32 phase) { barrier_wait(shared_address(barrier), phase); }

// The same value, which the compiler must keep in a register and can't recompute at each use. All lanes must call it.
__device__ __forceinline__ u32 kept(u32 value) { return __shfl_sync(~0u, value, threadIdx.x); }

// As `kept`, for a value that is equal in all lanes.
__device__ __forceinline__ u32 kept_uniform(u32 value) { return __shfl_sync(~0u, value, 0); }

__device__ __forceinline__ void bulk_copy(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// A stage's part of x or A from (row, column) on: [columns / 64][rows][64]. Rows that the matrix doesn't have become
// zero.
__device__ __forceinline__ void tensor_copy(void* to, const TensorMap* map, int column, int row, u64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
            shared_address(to)),
        "l"(map), "r"(0), "r"(row), "r"(column / 64), "r"(shared_address(barrier))
        : "memory");
}

// 64 columns, to the same place in both thread blocks of a cluster.
__device__ __forceinline__ void tensor_copy_to_both(void* to, const TensorMap* map, int column, int row, u64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
        "l"(map), "r"(0), "r"(row), "r"(column / 64), "r"(shared_address(barrier)), "h"((u16)3)
        : "memory");
}

// A box of 64 columns of `out` from (row, column) on: [rows][64]. Columns that it doesn't have become zero.
__device__ __forceinline__ void tile_copy(void* to, const TensorMap* map, int column, int row, u64* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                     shared_address(to)),
                 "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
                 : "memory");
}

// Copies such a box from shared memory to `out`, but for what that doesn't have.
__device__ __forceinline__ void tile_store(u32 from, const TensorMap* map, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(column), "r"(row),
                 "r"(from)
                 : "memory");
}

__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// The memory that this thread's stores read may be written again.
__device__ __forceinline__ void wait_for_stores_if(bool condition) {
    asm volatile(
        "{\n"
        ".reg .pred waits;\n"
        "setp.ne.b32 waits, %0, 0;\n"
        "@waits cp.async.bulk.wait_group.read 0;\n"
        "}\n" ::"r"((u32)condition)
        : "memory");
}

// What this thread wrote to shared memory is visible to copies that are issued after a barrier.
__device__ __forceinline__ void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// After this, all writes of earlier kernels are visible; before it, only memory that no kernel writes may be read.
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

constexpr u32 EMPTY = 0xFFFFFFFFu;  // a NaN that no arithmetic makes

__device__ __forceinline__ uint4 as_bits(const float4& v) {
    return {__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)};
}

__device__ __forceinline__ void send(uint4* to, const float4& v) {
    const uint4 bits = as_bits(v);
    asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(bits.x), "r"(bits.y), "r"(bits.z),
                 "r"(bits.w)
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

__device__ __forceinline__ bool is_empty(const uint4& v) {
    return v.x == EMPTY || v.y == EMPTY || v.z == EMPTY || v.w == EMPTY;
}

// Adds to SUMS sums those of up to COUNT parties, in their order; `some` of them exist. This thread has `own`, the sums
// of party `me`; the others send theirs to from(party, sum). Sums that haven't arrived are polled all at once.
template <int SUMS, int COUNT, typename From>
__device__ __forceinline__ void receive(float4* sum, const float4* own, int me, From from, int some) {
    uint4 v[COUNT][SUMS];
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int n = 0; n < SUMS; n++) {
            v[i][n] = {i < some ? EMPTY : 0, 0, 0, 0};
            if (i == me) v[i][n] = as_bits(own[n]);
        }
    for (bool missing = true; missing;) {
        missing = false;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int n = 0; n < SUMS; n++)
                if (is_empty(v[i][n])) v[i][n] = look(from(i, n));
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
            if (i != me) *from(i, n) = uint4{EMPTY, EMPTY, EMPTY, EMPTY};
            sum[n].x += __uint_as_float(v[i][n].x), sum[n].y += __uint_as_float(v[i][n].y);
            sum[n].z += __uint_as_float(v[i][n].z), sum[n].w += __uint_as_float(v[i][n].w);
        }
}

// Loads past L1, since another thread block may have written it.
__device__ __forceinline__ uint4 load_once(const uint4* pointer) {
    uint4 v;
    asm volatile("ld.global.cg.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(pointer)
                 : "memory");
    return v;
}

__device__ __forceinline__ uint2 load_once(const uint2* pointer) {
    uint2 v;
    asm volatile("ld.global.cg.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(pointer) : "memory");
    return v;
}

// --- products ---

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

__device__ __forceinline__ uint2 load_shared_pair(u32 address) {
    uint2 v;
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ void load_matrices(u32 r[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Four 8 x 8 matrices, transposed, whose rows lie at the lanes' addresses.
__device__ __forceinline__ void load_transposed(u32 r[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void store_transposed(u32 address, const u32 r[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

#define F4(c) "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
#define F16(i) F4(c[i]), F4(c[i + 1]), F4(c[i + 2]), F4(c[i + 3])
#define D16(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p) \
    "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h "," \
    "%" #i ",%" #j ",%" #k ",%" #l ",%" #m ",%" #n ",%" #o ",%" #p
#define WGMMA(n, d, a0, a1, a2, a3, x) \
    "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 " \
    "{" d "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #x ", 1, 1, 1, 0;"
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
__device__ __forceinline__ void multiply_add_shared(float4 c[X_TILES], const u32 a[4], u64 x) {
#if X_TILES == 4
    asm volatile(WGMMA(32, D_0, 16, 17, 18, 19, 20) : F16(0) : A_AND_X);
#elif X_TILES == 8
    asm volatile(WGMMA(64, D_0 "," D_16, 32, 33, 34, 35, 36) : F16(0), F16(4) : A_AND_X);
#elif X_TILES == 12
    asm volatile(WGMMA(96, D_0 "," D_16 "," D_32, 48, 49, 50, 51, 52) : F16(0), F16(4), F16(8) : A_AND_X);
#elif X_TILES == 16
    asm volatile(WGMMA(128, D_0 "," D_16 "," D_32 "," D_48, 64, 65, 66, 67, 68)
                 : F16(0), F16(4), F16(8), F16(12)
                 : A_AND_X);
#elif X_TILES == 20
    asm volatile(WGMMA(160, D_0 "," D_16 "," D_32 "," D_48 "," D_64, 80, 81, 82, 83, 84)
                 : F16(0), F16(4), F16(8), F16(12), F16(16)
                 : A_AND_X);
#elif X_TILES == 24
    asm volatile(WGMMA(192, D_0 "," D_16 "," D_32 "," D_48 "," D_64 "," D_80, 96, 97, 98, 99, 100)
                 : F16(0), F16(4), F16(8), F16(12), F16(16), F16(20)
                 : A_AND_X);
#elif X_TILES == 28
    asm volatile(WGMMA(224, D_0 "," D_16 "," D_32 "," D_48 "," D_64 "," D_80 "," D_96, 112, 113, 114, 115, 116)
                 : F16(0), F16(4), F16(8), F16(12), F16(16), F16(20), F16(24)
                 : A_AND_X);
#elif X_TILES == 32
    asm volatile(WGMMA(256, D_0 "," D_16 "," D_32 "," D_48 "," D_64 "," D_80 "," D_96 "," D_112, 128, 129, 130, 131, 132)
                 : F16(0), F16(4), F16(8), F16(12), F16(16), F16(20), F16(24), F16(28)
                 : A_AND_X);
#endif
}

#define WGMMA_A_SHARED(n, d, a, x) \
    "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" d "}, %" #a ", %" #x ", 1, 1, 1, 0, 0;"

// The same with 64 rows of A in shared memory.
__device__ __forceinline__ void multiply_add_both_shared(float4 c[X_TILES], u64 a, u64 x) {
#if X_TILES == 8
    asm volatile(WGMMA_A_SHARED(64, D_0 "," D_16, 32, 33) : F16(0), F16(4) : "l"(a), "l"(x));
#elif X_TILES == 12
    asm volatile(WGMMA_A_SHARED(96, D_0 "," D_16 "," D_32, 48, 49) : F16(0), F16(4), F16(8) : "l"(a), "l"(x));
#elif X_TILES == 16
    asm volatile(WGMMA_A_SHARED(128, D_0 "," D_16 "," D_32 "," D_48, 64, 65)
                 : F16(0), F16(4), F16(8), F16(12)
                 : "l"(a), "l"(x));
#elif X_TILES == 20
    asm volatile(WGMMA_A_SHARED(160, D_0 "," D_16 "," D_32 "," D_48 "," D_64, 80, 81)
                 : F16(0), F16(4), F16(8), F16(12), F16(16)
                 : "l"(a), "l"(x));
#elif X_TILES == 24
    asm volatile(WGMMA_A_SHARED(192, D_0 "," D_16 "," D_32 "," D_48 "," D_64 "," D_80, 96, 97)
                 : F16(0), F16(4), F16(8), F16(12), F16(16), F16(20)
                 : "l"(a), "l"(x));
#elif X_TILES == 28
    asm volatile(WGMMA_A_SHARED(224, D_0 "," D_16 "," D_32 "," D_48 "," D_64 "," D_80 "," D_96, 112, 113)
                 : F16(0), F16(4), F16(8), F16(12), F16(16), F16(20), F16(24)
                 : "l"(a), "l"(x));
#elif X_TILES == 32
    asm volatile(WGMMA_A_SHARED(256, D_0 "," D_16 "," D_32 "," D_48 "," D_64 "," D_80 "," D_96 "," D_112, 128, 129)
                 : F16(0), F16(4), F16(8), F16(12), F16(16), F16(20), F16(24), F16(28)
                 : "l"(a), "l"(x));
#endif
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all but the last `PENDING` committed groups have ended.
template <int PENDING>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The descriptor of 16 columns of x or A: rows of 128 bytes, groups of 8 rows 1,024 bytes apart, 128-byte swizzle.
__device__ __forceinline__ u64 matrix_descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// The descriptor of what is `offset` bytes further: both halves by themselves, as sums that carry over take more
// instructions.
__device__ __forceinline__ u64 shifted(u64 descriptor, u32 offset) {
    return (u64)((u32)descriptor + offset / 16) | (u64)(1024 >> 4 | 1 << 30) << 32;
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
