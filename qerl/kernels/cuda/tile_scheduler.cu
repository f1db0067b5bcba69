// The decode product's parameters and sizes, and how its thread blocks divide the work. It is arithmetic alone: a test
// compiles it for a CPU (test_tile_scheduler.py).

// Up to 32 rows of x, separate warps compute A x, and all of it is in shared memory.
constexpr bool SMALL_BATCH = X_TILES <= 4;
// A cohort's rows have adapters of several runs: stacked as one of rank RANK, in which a row takes the ranks of its run, or
// by runs, each of rank RANK.
enum Cohort { ONE_RUN, STACKED, BY_RUNS };
// A x by separate warps, not by stages: few rows, or by runs, since a tile then needs the ranks of its own runs alone.
constexpr bool SHRINK_BY_WARPS = SMALL_BATCH || COHORT == BY_RUNS;
constexpr bool MMA_SYNC = X_TILES <= 2;  // mma.sync, not wgmma
constexpr int WARPS = 8;                 // that multiply
constexpr int SHRINK_WARPS = MMA_SYNC ? 1 : 3;  // warps for A x or its sums
constexpr int BLOCK_TILES = 8, BLOCK_ROWS = 16 * BLOCK_TILES, BLOCK_COLUMNS = 128, GROUPS = BLOCK_COLUMNS / 16;
constexpr int STAGE_BLOCKS = X_TILES <= 8 ? 2 : 1, STAGE_COLUMNS = STAGE_BLOCKS * BLOCK_COLUMNS;
constexpr int TILE_BYTES = 16 * BLOCK_COLUMNS / 2 + 16 * GROUPS;
constexpr int BLOCK_BYTES = BLOCK_TILES * TILE_BYTES;
constexpr int WEIGHT_BYTES = STAGE_BLOCKS * BLOCK_BYTES;
constexpr int ROWS = X_TILES * 8;
// Beyond 128 rows of x a worker is a cluster of two thread blocks, which have half of a row of blocks each
// (many_rows.cu).
constexpr bool MANY_ROWS = CLUSTER > 1;
constexpr int SPAN_ROWS = BLOCK_ROWS * CLUSTER;  // of W in a worker's row of blocks
constexpr int RANK_TILES = RANK / 16;
constexpr int SHRINK_ROWS = 32;  // of A in a stage
constexpr int X_PART_BYTES = ROWS * 128;  // 64 columns
constexpr int SHRINK_PART_BYTES = SHRINK_ROWS * 128;
constexpr int EXPAND_TILES = 8, EXPAND_TILE_BYTES = ROWS * 32;  // of A x in a stage; each has 16 rows of A
// Beyond 32 rows of x: the time of B (A x), for the worker that begins a row of blocks, in units of W.
constexpr int EXPAND_UNITS = SMALL_BATCH || RANK == 0 ? 0 : 2;
constexpr int STAGE_BYTES = WEIGHT_BYTES + STAGE_COLUMNS / 64 * X_PART_BYTES;
// After the stages: sums that warps exchange, and A x.
constexpr int EXCHANGED = STAGES * STAGE_BYTES, LOCAL = EXCHANGED + (MMA_SYNC ? 4096 * X_TILES : 0);
constexpr int TILES = MMA_SYNC ? 2 : 1;     // of 16 rows of W that a warp multiplies
// Workers that have parts of a row of blocks share out its sums, SUMS tiles of rows of x at a time.
constexpr int SUMS = MMA_SYNC ? X_TILES : X_TILES == 4 ? 1 : 2, CHUNKS = X_TILES / SUMS;

// With many rows, sums of others come in so many stages, and this is how far the barriers of a stage's second half are
// away.
constexpr int SUM_STAGES = 2, SUM_STAGE_BYTES = BLOCK_ROWS * ROWS * 4 / SUM_STAGES;
constexpr u32 SECOND_HALF = 16 * STAGES;

enum Mode { PLAIN, RESIDUAL, GATED };

struct Params {
    TensorMap x_map;        // x as [columns / 64, m, 64], in boxes of a stage's columns and ROWS rows, 128-byte swizzle
    TensorMap a_map;        // of A likewise, SHRINK_ROWS rows
    TensorMap out_map;      // with many rows, out in boxes of 64 columns and ROWS rows, 128-byte swizzle
    const u8* weights;
    const u16* x;           // [m, columns]
    u16* out;               // [m, rows], with GATED [m, rows / 2]
    const float* bias;      // [rows] in the order of the tiles, or null
    const u16* lora_a;      // [parts * ranks, columns], with ranks = RANK, or by runs run_count * RANK
    const u16* lora_b[3];   // of each part, [rows of the part, ranks]
    u16* shrunk;            // [row blocks][ROWS * parts * RANK]: A x, scaled
    uint4* sums;            // [2][thread blocks][BLOCK_ROWS * ROWS / 4] of divided rows of blocks; EMPTY before and after.
                            // With many rows [thread blocks][...], of any content
    uint4* shrink_sums;     // [row blocks of x][parts * RANK_TILES][senders][ROWS * 16 / 4]; EMPTY before and after
    int* counters;          // [row blocks of x][2]: parts of A x that are there, workers that saw all of it; zero before and after
    float factor[3];        // of each part, multiplies W's products
    const float* lora_factor;  // [parts * runs], multiplies A x
    const int* runs;        // [m], the run of each row of x in a cohort
    float gate[2];          // a and b: with GATED out = gate / (1 + 2^(a gate + b gate^3)) * up
    int part_end[3];        // row behind each part
    int m, rows, columns, parts, mode, scale_multiplier, scale_offset, row_blocks;
    int senders;            // at most, of sums of 16 rows of A
    int span;               // with SHRINK_BY_WARPS, columns of A that a warp takes at a time, in BLOCK_COLUMNS
    int run_count;          // 1 without a cohort
    int* arrived;           // [thread blocks] with many rows, whether its sums are there; zero before and after
};

// --- division of the work ---

// Units 0 to `units` - 1 are divided among workers in order, as evenly as possible. Returns the first unit of a worker.
__device__ __forceinline__ int first_unit(int units, int workers, int worker) { return (int)((u32)units * worker / workers); }

// Returns the worker of a unit, if there are at least as many units as workers.
__device__ __forceinline__ int worker_of(int units, int workers, int unit) {
    return (int)(((u32)(unit + 1) * workers - 1) / units);
}

// Units of A beyond 32 rows of x: blocks of SHRINK_ROWS x STAGE_COLUMNS for each thread block of a worker.
struct ShrinkUnits {
    int units, workers;

    __device__ __forceinline__ ShrinkUnits(const Params& p, int all_workers) {
        constexpr int SPAN = SHRINK_ROWS * CLUSTER;
        units = SHRINK_BY_WARPS ? 0 : (p.parts * RANK + SPAN - 1) / SPAN * (p.columns / STAGE_COLUMNS);
        workers = min(all_workers, units);
    }
    __device__ __forceinline__ int start(int w) const { return units ? first_unit(units, workers, min(w, workers)) : 0; }
    __device__ __forceinline__ int sender(int unit) const { return worker_of(units, workers, unit); }
};

// The work of a thread block, stage by stage: beyond 32 rows of x units of A, then units of W, BLOCK_ROWS x
// STAGE_COLUMNS. The thread blocks of a worker have the same units, and in each other rows.
struct Share {
    int worker, workers, row_block, column_blocks, rank;  // in the cluster
    int first_shrink, shrinks, first, last;

    __device__ Share(const Params& p) {
        rank = blockIdx.x % CLUSTER;
        row_block = blockIdx.x / CLUSTER % p.row_blocks;
        worker = blockIdx.x / CLUSTER / p.row_blocks;
        workers = gridDim.x / CLUSTER / p.row_blocks;
        column_blocks = p.columns / STAGE_COLUMNS;
        first = start(p, worker), last = start(p, worker + 1);
        const ShrinkUnits a(p, workers);
        first_shrink = a.start(worker), shrinks = a.start(worker + 1) - first_shrink;
    }
    __device__ __forceinline__ int stages() const { return shrinks + last - first; }
    __device__ __forceinline__ int unit(int stage) const {
        return stage < shrinks ? first_shrink + stage : first + stage - shrinks;
    }
    // Stages of A count as stages of W do: a worker that has more of A's has fewer of W's. There are twice as many of
    // W's as workers, or one worker, so each has at least one of W's. B (A x) counts as units ahead of each row's,
    // unless a worker could then have nothing else.
    __device__ int start(const Params& p, int w) const {
        const int rows = (p.rows + SPAN_ROWS - 1) / SPAN_ROWS;
        const int more = rows * (column_blocks + EXPAND_UNITS) > (EXPAND_UNITS + 2) * workers ? EXPAND_UNITS : 0;
        const ShrinkUnits a(p, workers);
        const int place = first_unit(rows * (column_blocks + more) + a.units, workers, w) - a.start(w);
        if (!more) return place;
        const int row = place / (column_blocks + more);
        return row * column_blocks + max(place - row * (column_blocks + more) - more, 0);
    }
};

// How a row of blocks is split: `count` successive workers have parts. Those whose last row it is own sums of it, which
// they add up: all but, maybe, the last worker. With one chunk, or with many rows, the first worker owns all.
struct RowSplit {
    int me, count, owners;

    __device__ __forceinline__ RowSplit(int me, int count, int owners) : me(me), count(count), owners(owners) {}
    // For a row that one worker has, and for a worker's first row, whose beginning others have.
    static __device__ __forceinline__ RowSplit whole() { return {0, 1, 1}; }
    static __device__ __forceinline__ RowSplit of_first() { return {1, 2, 1}; }
    // For a worker's last row.
    __device__ RowSplit(const Params& p, const Share& share) {
        const int begin = (share.last - 1) / share.column_blocks * share.column_blocks, end = begin + share.column_blocks;
        int first = share.worker, after = share.worker + 1;
        while (share.start(p, first) > begin) first--;
        while (share.start(p, after) < end) after++;
        me = share.worker - first, count = after - first;
        owners = CHUNKS > 1 && !MANY_ROWS ? count - (share.start(p, after) > end) : 1;
    }
    __device__ __forceinline__ int owner(int chunk) const { return chunk * owners / CHUNKS; }
    // Where part `i` sends its sums. A worker that owns none may also send those of its last row.
    __device__ __forceinline__ uint4* sums(const Params& p, int i) const {
        const int block = (int)blockIdx.x + (i - me) * p.row_blocks * CLUSTER + (i < owners ? (int)gridDim.x : 0);
        return p.sums + (size_t)block * (BLOCK_ROWS * ROWS / 4);
    }
    __device__ __forceinline__ int* arrived(const Params& p, int i) const {
        return p.arrived + (int)blockIdx.x + (i - me) * p.row_blocks * CLUSTER;
    }
};

__device__ __forceinline__ int part_of(const Params& p, int row) { return (row >= p.part_end[0]) + (row >= p.part_end[1]); }

// The tiles of A x that a row of blocks needs, where they come as stages: those of all its parts.
struct Expansion {
    int first, tiles;

    __device__ __forceinline__ Expansion(const Params& p, int row) {
        const int low = p.mode == GATED ? 0 : part_of(p, row * SPAN_ROWS);
        const int high = p.mode == GATED ? 1 : part_of(p, min((row + 1) * SPAN_ROWS, p.rows) - 1);
        first = low * RANK_TILES, tiles = SHRINK_BY_WARPS ? 0 : (high + 1 - low) * RANK_TILES;
    }
    __device__ __forceinline__ int stages() const { return (tiles + EXPAND_TILES - 1) / EXPAND_TILES; }
};

// The stages in the order in which one thread copies them. A step takes no integer division.
struct StageIterator {
    int i, row, column, expansion;  // unit and, if not 0, the number of the stage behind it, of A x or with many rows of out

    __device__ __forceinline__ explicit StageIterator(const Share& share) : i(0), expansion(0) { enter(share); }
    __device__ __forceinline__ void enter(const Share& share) {
        row = share.unit(i) / share.column_blocks, column = share.unit(i) % share.column_blocks;
    }
    __device__ __forceinline__ void advance(const Params& p, const Share& share) {
        const bool ends = i >= share.shrinks && (column + 1 == share.column_blocks || i + 1 == share.stages());
        const int whole = MANY_ROWS && column + 1 == share.column_blocks;
        if (!SMALL_BATCH && (RANK || MANY_ROWS) && ends && row * share.column_blocks >= share.first &&
            expansion < Expansion(p, row).stages() + whole) {
            expansion++;
            return;
        }
        expansion = 0, i++, column++;
        if (i == share.shrinks) enter(share);
        if (column == share.column_blocks) column = 0, row++;
    }
};
