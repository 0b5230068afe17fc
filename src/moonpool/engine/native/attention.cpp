// Causal attention of the rows of a step over their sequences' blocks.
//
// A work item is one kv head of one sequence and up to ITEM_TILES tiles of rows, a row being one
// query head of one token. It walks the context in tiles of SPAN tokens that start at multiples
// of SPAN, with a running maximum and sum per row (online softmax). So a row's arithmetic is a
// function of its position: the same in a decode, in a chunk of any size, and next to any other
// rows.
//
// Beyond a row's context: scores are replaced, not multiplied, so NaN there is harmless; V is not
// read past the last context of the tile, and half of the last lane is cut off where that is odd.
#include "simd.h"

namespace moonpool {
namespace {

constexpr int SPAN = 256;
constexpr int ITEM_TILES = 56 / MAX_ROWS;
constexpr int ITEM_ROWS = ITEM_TILES * MAX_ROWS;

struct AttendCall {
    const char* q;
    char* out;
    const char* blocks;  // of this layer: slice of block b at b * block_bytes
    const int32_t* positions;
    const int32_t* row_starts;
    const int32_t* block_tables;
    int64_t block_bytes, num_blocks, table_width, sequences;
    int64_t heads, kv_heads, head_dim, block_tokens;
    float scale;
};

// What the tiles of one work item share, and where its temporaries lie.
template <class L>
struct Item {
    typedef typename L::T T;
    const AttendCall* call;
    const int32_t* table;
    const char* keys;  // of this kv head in block 0
    const char* values;
    int32_t* q;     // per tile [head_dim lanes][rows of the tile]
    float* out;     // [rows][head_dim], not yet divided by the sum
    float* scores;  // [rows of a tile][SPAN]
    T* weights;     // [rows of a tile][SPAN]
    int64_t context;  // most tokens any row of the item sees
};

// State of the rows of one tile. A vector holds one number of every row: MAX_ROWS < W.
struct Rows {
    int32_t limit[MAX_ROWS];  // tokens of context, own token included
    float highest[W];         // score so far, times scale
    float rescale[W];         // of what was summed before this span
    alignas(64) float sums[MAX_ROWS][W];
};
static_assert(MAX_ROWS <= W, "one lane per row");

// scores = q k for the tokens [begin, end) of one span, `begin` being its start.
// `ahead_step`: V of the same tokens is fetched meanwhile, so many bytes per lane of head_dim.
template <class L, int ROWS, int VECS>
MP_INLINE void score(const Item<L>& it, const int32_t* q, int64_t begin, int64_t end,
                     int64_t ahead_step) {
    const AttendCall& c = *it.call;
    const int64_t bt = c.block_tokens, lanes = c.head_dim / L::PACK;
    for (int64_t token = begin; token < end; token += VECS * W) {
        const int64_t block = it.table[token / bt] * c.block_bytes;
        const int32_t* k = (const int32_t*)(it.keys + block) + token % bt;
        const char* v = it.values + block + token % bt * c.head_dim * sizeof(typename L::T);
        vf sums[ROWS][VECS];
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v) sums[r][v] = zero();
        }
        accumulate<L, ROWS, VECS, 1, ROWS, VECS>(sums, q, k, bt, lanes, v, ahead_step);
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v)
                store(it.scores + r * SPAN + (token - begin) + v * W, sums[r][v]);
        }
    }
}

// scores -> weights = 2^(scale * score - highest), rounded to the type; 0 beyond a row's context.
template <class L, int ROWS>
MP_INLINE void soften(const Item<L>& it, Rows& rows, int64_t begin, int width, float scale) {
    float tops[W] = {};
    for (int r = 0; r < ROWS; ++r) {
        float* scores = it.scores + r * SPAN;
        const int64_t valid = rows.limit[r] - begin, whole = valid < 0 ? 0 : valid / W * W;
        vf top = set1(-INFINITY);
        int64_t i = 0;
        for (; i < least(whole, width); i += W) top = max(top, load(scores + i));
        for (; i < width; i += W) {
            const vf s = keep_first(load(scores + i), valid - i, -INFINITY);
            store(scores + i, s);
            top = max(top, s);
        }
        tops[r] = highest(top);
    }
    const vf before = load(rows.highest), factor = set1(scale);
    const vf now = max(mul(load(tops), factor), before);
    store(rows.highest, now);
    store(rows.rescale, exp2v(sub(before, now)));
    for (int r = 0; r < ROWS; ++r) {
        const float* scores = it.scores + r * SPAN;
        typename L::T* weights = it.weights + r * SPAN;
        const vf offset = set1(-rows.highest[r]);
        vf total = mul(load(rows.sums[r]), set1(rows.rescale[r]));
        for (int i = 0; i < width; i += W) {
            const vf p = exp2v(fma(load(scores + i), factor, offset));
            total = add(total, p);
            L::store(weights + i, p);
        }
        store(rows.sums[r], total);
    }
}

// out = out * rescale + weights v for VECS vectors of head_dim from `column` on.
// `ahead_step`: K of the next span is fetched meanwhile, so many bytes per lane of tokens.
template <class L, int ROWS, int VECS>
MP_INLINE void blend(const Item<L>& it, const Rows& rows, float* out, int64_t column, int64_t begin,
                     int64_t end, int64_t ahead_step) {
    const AttendCall& c = *it.call;
    const int64_t d = c.head_dim, bt = c.block_tokens;
    constexpr int ROW_LANES = SPAN / L::PACK;
    const int32_t* weights = (const int32_t*)it.weights;
    vf sums[ROWS][VECS];
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v)
            sums[r][v] = mul(load(out + r * d + column + v * W), set1(rows.rescale[r]));
    }
    for (int64_t token = begin; token < end;) {
        const int64_t stop = least(end, (token / bt + 1) * bt);
        const char* block = it.values + it.table[token / bt] * c.block_bytes;
        const int32_t* v = (const int32_t*)block + (token % bt) / L::PACK * d + column;
        const int32_t* p = weights + (token - begin) / L::PACK;
        const int64_t lanes = (stop - token) / L::PACK;
        const int64_t later = least(token + SPAN, it.context - 1) / bt;
        const int64_t inside = token % bt * d + column * (stop - token);
        const char* next =
            it.keys + it.table[later] * c.block_bytes + inside * (int64_t)sizeof(typename L::T);
        accumulate<L, ROWS, VECS, ROW_LANES, 1, VECS>(sums, p, v, d, lanes, next, ahead_step);
        if ((stop - token) % L::PACK) {
            alignas(64) int32_t last[VECS * W];
            for (int64_t i = 0; i < VECS * W; ++i) last[i] = v[lanes * d + i] & 0xffff;
            accumulate<L, ROWS, VECS, ROW_LANES, 1, 0>(sums, p + lanes, last, d, 1, nullptr, 0);
        }
        token = stop;
    }
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) store(out + r * d + column + v * W, sums[r][v]);
    }
}

// One tile of rows over one span of the context.
template <class L, int ROWS>
void tile(const Item<L>& it, Rows& rows, const int32_t* q, float* out, int64_t begin,
          bool first) {
    const AttendCall& c = *it.call;
    int64_t end = 0;
    for (int r = 0; r < ROWS; ++r) end = rows.limit[r] > end ? rows.limit[r] : end;
    end = least(end, begin + SPAN);
    if (end <= begin) return;
    const int width = (int)(ceil_div(end - begin, W) * W);
    // Only the first tile that passes over a span needs to fetch: the others find it in the cache.
    const int64_t fetch_one = first ? W * 4 : 0, fetch_two = first ? 2 * W * 4 : 0;
    if (2 * ROWS <= MAX_ROWS && c.block_tokens % (4 * W) == 0)
        score<L, ROWS, 2 * ROWS <= MAX_ROWS ? 4 : 2>(it, q, begin, end, 2 * fetch_two);
    else if (c.block_tokens % (2 * W) == 0)
        score<L, ROWS, 2>(it, q, begin, end, fetch_two);
    else
        score<L, ROWS, 1>(it, q, begin, end, fetch_one);
    soften<L, ROWS>(it, rows, begin, width, c.scale * 1.44269504f);
    int64_t column = 0;
    if (2 * ROWS <= MAX_ROWS)
        for (; column + 4 * W <= c.head_dim; column += 4 * W)
            blend<L, ROWS, 2 * ROWS <= MAX_ROWS ? 4 : 2>(it, rows, out, column, begin, end,
                                                         2 * fetch_two);
    for (; column + 2 * W <= c.head_dim; column += 2 * W)
        blend<L, ROWS, 2>(it, rows, out, column, begin, end, fetch_two);
    if (column < c.head_dim) blend<L, ROWS, 1>(it, rows, out, column, begin, end, fetch_one);
}

template <class L>
using TileFn = void (*)(const Item<L>&, Rows&, const int32_t*, float*, int64_t, bool);

template <class L>
TileFn<L> tile_for(int rows) {
    switch (rows) {
        case 1: return tile<L, 1>;
        case 2: return tile<L, 2>;
        case 3: return tile<L, 3>;
        case 4: return tile<L, 4>;
#if !defined(MP_ISA_avx2)
        case 5: return tile<L, 5>;
        case 6: return tile<L, 6>;
        case 7: return tile<L, 7>;
        case 8: return tile<L, 8>;
        case 9: return tile<L, 9>;
        case 10: return tile<L, 10>;
        case 11: return tile<L, 11>;
        case 12: return tile<L, 12>;
        case 13: return tile<L, 13>;
        case 14: return tile<L, 14>;
#endif
        default: __builtin_trap();
    }
}

// Rows [first, first + count) of a sequence and kv head; row r is query head r % group of its token
// r / group.
template <class L>
void work(const AttendCall& c, int64_t sequence, int64_t kv_head, int64_t first, int64_t count) {
    typedef typename L::T T;
    static thread_local Scratch scratch;
    const int64_t d = c.head_dim, lanes = d / L::PACK, group = c.heads / c.kv_heads;
    const int64_t head_elements = d * c.block_tokens, row0 = c.row_starts[sequence];
    char* memory = scratch.take(ITEM_ROWS * d * 8 + MAX_ROWS * SPAN * 8);
    Item<L> it;
    it.call = &c;
    it.table = c.block_tables + sequence * c.table_width;
    it.keys = c.blocks + kv_head * head_elements * sizeof(T);
    it.values = it.keys + c.kv_heads * head_elements * sizeof(T);
    it.scores = (float*)memory;
    it.weights = (T*)(memory + MAX_ROWS * SPAN * 4);
    it.out = (float*)(memory + MAX_ROWS * SPAN * 8);
    it.q = (int32_t*)(it.out + ITEM_ROWS * d);

    auto element = [&](int64_t r) {  // of q and out: where the row's head begins
        return ((row0 + r / group) * c.heads + kv_head * group + r % group) * d;
    };
    const int64_t tiles = ceil_div(count, MAX_ROWS), size = count / tiles, larger = count % tiles;
    int64_t start[ITEM_TILES + 1];
    Rows rows[ITEM_TILES];
    it.context = 0;
    for (int64_t i = 0; i <= tiles; ++i) start[i] = i * size + least(i, larger);
    for (int64_t i = 0; i < tiles; ++i) {
        const int64_t n = start[i + 1] - start[i];
        store(rows[i].highest, set1(-INFINITY));
        for (int64_t r = 0; r < n; ++r) {
            const int64_t row = first + start[i] + r;
            rows[i].limit[r] = c.positions[row0 + row / group] + 1;
            store(rows[i].sums[r], zero());
            if (rows[i].limit[r] > it.context) it.context = rows[i].limit[r];
            const char* from = c.q + element(row) * sizeof(T);
            for (int64_t k = 0; k < lanes; ++k)
                memcpy(it.q + start[i] * lanes + k * n + r, from + 4 * k, 4);
        }
    }
    memset(it.out, 0, count * d * sizeof(float));
    for (int64_t begin = 0; begin < it.context; begin += SPAN) {
        for (int64_t i = 0; i < tiles; ++i)
            tile_for<L>((int)(start[i + 1] - start[i]))(it, rows[i], it.q + start[i] * lanes,
                                                        it.out + start[i] * d, begin, i == 0);
    }
    for (int64_t i = 0; i < tiles; ++i) {
        for (int64_t r = start[i]; r < start[i + 1]; ++r) {
            const vf whole = set1(1.f / sum(load(rows[i].sums[r - start[i]])));
            T* to = (T*)c.out + element(first + r);
            for (int64_t j = 0; j < d; j += W)
                L::store(to + j, mul(load(it.out + r * d + j), whole));
        }
    }
}

// Whether every block that the rows will read is there.
bool sound(const AttendCall& c) {
    for (int64_t s = 0; s < c.sequences; ++s) {
        int64_t context = 0;
        for (int64_t row = c.row_starts[s]; row < c.row_starts[s + 1]; ++row) {
            if (c.positions[row] < 0) return false;
            if (c.positions[row] >= context) context = c.positions[row] + 1;
        }
        const int64_t blocks = ceil_div(context, c.block_tokens);
        if (blocks > c.table_width) return false;
        for (int64_t i = 0; i < blocks; ++i) {
            const int64_t block = c.block_tables[s * c.table_width + i];
            if (block < 0 || block >= c.num_blocks) return false;
        }
    }
    return true;
}

// Writes nothing and returns 1 if a row's context lies outside the tables.
template <class L>
int attend(const AttendCall& c, int threads) {
    if (!sound(c)) return 1;
    const int64_t group = c.heads / c.kv_heads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t s = 0; s < c.sequences; ++s) {
        const int64_t rows = (c.row_starts[s + 1] - c.row_starts[s]) * group;
        const int64_t items = ceil_div(rows, ITEM_ROWS);
#pragma omp for schedule(dynamic) nowait
        for (int64_t i = 0; i < items * c.kv_heads; ++i) {
            const int64_t part = i % items, first = rows * part / items;
            work<L>(c, s, i / items, first, rows * (part + 1) / items - first);
        }
    }
    return 0;
}

}  // namespace
}  // namespace moonpool

MP_EXPORT(moonpool_attend_f32)(const moonpool::AttendCall* call, int threads) {
    return moonpool::attend<moonpool::F32>(*call, threads);
}

MP_EXPORT(moonpool_attend_b16)(const moonpool::AttendCall* call, int threads) {
    return moonpool::attend<moonpool::B16>(*call, threads);
}
