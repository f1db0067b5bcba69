// What the decode product is given, its sizes, and how its thread blocks divide the work: its second part of six. Arithmetic
// alone: tests/unit/test_decode_division.py compiles it for a CPU.

constexpr bool FEW = NT <= 4;            // rows of x: warps for A x, which then lies in shared memory as a whole
constexpr bool SYNC = NT <= 2;           // mma.sync, not wgmma
constexpr int WARPS = 8;                 // that multiply
constexpr int SHRINKERS = SYNC ? 1 : 3;  // warps for A x or its sums
constexpr int BLOCK_TILES = 8, BLOCK_ROWS = 16 * BLOCK_TILES, BLOCK_COLUMNS = 128, GROUPS = BLOCK_COLUMNS / 16;
constexpr int STAGE_BLOCKS = NT <= 8 ? 2 : 1, STAGE_COLUMNS = STAGE_BLOCKS * BLOCK_COLUMNS;
constexpr int TILE_BYTES = 16 * BLOCK_COLUMNS / 2 + 16 * GROUPS;
constexpr int BLOCK_BYTES = BLOCK_TILES * TILE_BYTES;
constexpr int WEIGHT_BYTES = STAGE_BLOCKS * BLOCK_BYTES;
constexpr int ROWS = NT * 8;
constexpr int RANK_TILES = RANK / 16;
constexpr int SHRINK_ROWS = 32;  // of A in a stage
constexpr int X_PART_BYTES = ROWS * 128;  // 64 columns
constexpr int SHRINK_PART_BYTES = SHRINK_ROWS * 128;
constexpr int EXPAND_TILES = 8, EXPAND_TILE_BYTES = ROWS * 32;  // of A x in a stage; each has 16 rows of A
// With many rows of x B (A x) of a row of blocks takes whoever begins the row as long as so many units of W.
constexpr int EXPAND_UNITS = FEW || RANK == 0 ? 0 : 2;
constexpr int STAGE_BYTES = WEIGHT_BYTES + STAGE_COLUMNS / 64 * X_PART_BYTES;
// Behind the stages: sums that warps exchange, and A x.
constexpr int EXCHANGED = STAGES * STAGE_BYTES, LOCAL = EXCHANGED + (SYNC ? 4096 * NT : 0);
constexpr int TILES = SYNC ? 2 : 1;     // of 16 rows of W that a warp multiplies
// Of a divided row of blocks the sums are shared out, SUMS tiles of rows of x at a time, among those who have its parts.
constexpr int SUMS = SYNC ? NT : NT == 4 ? 1 : 2, CHUNKS = NT / SUMS;

enum Mode { PLAIN, RESIDUAL, SILU };

struct Params {
    TensorMap x_map;        // x as [columns / 64, m, 64], in boxes of a stage's columns and ROWS rows, 128-byte swizzle
    TensorMap a_map;        // of A likewise, SHRINK_ROWS rows
    const u8* weights;
    const u16* x;           // [m, columns]
    u16* out;               // [m, rows], with SILU [m, rows / 2]
    const float* bias;      // [rows] in the order of the tiles, or null
    const u16* lora_a;      // [parts * RANK, columns]
    const u16* lora_b[3];   // of each part, [rows of the part, RANK]
    u16* shrunk;            // [row blocks][ROWS * parts * RANK]: A x, scaled
    uint4* sums;            // [2][thread blocks][BLOCK_ROWS * ROWS / 4] of divided rows of blocks; EMPTY before and after
    uint4* shrink_sums;     // [row blocks of x][parts * RANK_TILES][senders][ROWS * 16 / 4]; EMPTY before and after
    int* counters;          // [row blocks of x][2]: what of A x is there, who saw all of it; zero before and after
    float factor[3];        // of each part, multiplies W's products
    float lora_factor[3];   // of each part, multiplies A x
    int part_end[3];        // row behind each part
    int m, rows, columns, parts, mode, scale_multiplier, scale_offset, row_blocks;
    int senders;            // at most, of sums of 16 rows of A
    int span;               // few rows of x: columns of A that a warp takes at a time, in BLOCK_COLUMNS
};

// --- division of the work ---

// Units 0 to `units` - 1 go to workers in their order, as evenly as can be. The unit that a worker begins with:
__device__ __forceinline__ int first_unit(int units, int workers, int worker) { return (int)((u32)units * worker / workers); }

// Whose unit it is, where there are at least as many units as workers.
__device__ __forceinline__ int worker_of(int units, int workers, int unit) {
    return (int)(((u32)(unit + 1) * workers - 1) / units);
}

// Of A, with many rows of x: units are blocks of SHRINK_ROWS x STAGE_COLUMNS.
struct ShrinkUnits {
    int units, workers;

    __device__ __forceinline__ ShrinkUnits(const Params& p, int all_workers) {
        units = FEW ? 0 : (p.parts * RANK + SHRINK_ROWS - 1) / SHRINK_ROWS * (p.columns / STAGE_COLUMNS);
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
    // workers, or one worker, everyone has one of W's. B (A x) counts as units ahead of each row's, unless somebody could then
    // have nothing else.
    __device__ int start(const Params& p, int w) const {
        const int rows = (p.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        const int more = rows * (column_blocks + EXPAND_UNITS) > (EXPAND_UNITS + 2) * workers ? EXPAND_UNITS : 0;
        const ShrinkUnits a(p, workers);
        const int place = first_unit(rows * (column_blocks + more) + a.units, workers, w) - a.start(w);
        if (!more) return place;
        const int row = place / (column_blocks + more);
        return row * column_blocks + max(place - row * (column_blocks + more) - more, 0);
    }
};

// How a row of blocks is divided: `count` workers in a row have parts. All whose last row it is own sums of it, which they add
// up; that is everyone but, maybe, the last. With one chunk the first owns all.
struct Division {
    int me, count, owners;

    __device__ __forceinline__ Division(int me, int count, int owners) : me(me), count(count), owners(owners) {}
    // Of a row that one worker has, and of a worker's first row, whose beginning others have.
    static __device__ __forceinline__ Division whole() { return {0, 1, 1}; }
    static __device__ __forceinline__ Division of_first() { return {1, 2, 1}; }
    // Of a worker's last row.
    __device__ Division(const Params& p, const Share& share) {
        const int begin = (share.last - 1) / share.column_blocks * share.column_blocks, end = begin + share.column_blocks;
        int first = share.worker, after = share.worker + 1;
        while (share.start(p, first) > begin) first--;
        while (share.start(p, after) < end) after++;
        me = share.worker - first, count = after - first;
        owners = CHUNKS > 1 ? count - (share.start(p, after) > end) : 1;
    }
    __device__ __forceinline__ int owner(int chunk) const { return chunk * owners / CHUNKS; }
    // Where part `i` sends its sums: who doesn't own any may send those of its last row, too.
    __device__ __forceinline__ uint4* sums(const Params& p, int i) const {
        const int block = (int)blockIdx.x + (i - me) * p.row_blocks + (i < owners ? (int)gridDim.x : 0);
        return p.sums + (size_t)block * (BLOCK_ROWS * ROWS / 4);
    }
};

__device__ __forceinline__ int part_of(const Params& p, int row) { return (row >= p.part_end[0]) + (row >= p.part_end[1]); }

// The tiles of A x that a row of blocks needs, where they come as stages: those of all its parts.
struct Expansion {
    int first, tiles;

    __device__ __forceinline__ Expansion(const Params& p, int row) {
        const int low = p.mode == SILU ? 0 : part_of(p, row * BLOCK_ROWS);
        const int high = p.mode == SILU ? 1 : part_of(p, min((row + 1) * BLOCK_ROWS, p.rows) - 1);
        first = low * RANK_TILES, tiles = FEW ? 0 : (high + 1 - low) * RANK_TILES;
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
        if (!FEW && RANK && ends && row * share.column_blocks >= share.first && expansion < Expansion(p, row).stages()) {
            expansion++;
            return;
        }
        expansion = 0, i++, column++;
        if (i == share.shrinks) enter(share);
        if (column == share.column_blocks) column = 0, row++;
    }
};
