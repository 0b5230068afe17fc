// Causal attention of the rows of a step over their sequences' blocks.
//
// A work item is one kv head of one sequence and up to ITEM_TILES tiles of rows, a row being one
// query head of one token. It walks the context in tiles of SPAN tokens that start at multiples
// of SPAN, with a running maximum and sum per row (online softmax). So a row's arithmetic is a
// function of its position: the same in a decode, in a chunk of any size, and next to any other
// rows. Every SEGMENT tokens it begins anew and what it has is folded into what it had: so the
// segments of a long context may be walked anywhere, and the fold in their order gives the very
// bits of one walk (`partials`, `merge`). A walk may also stop before a span and go on later
// (`to`, `from`).
//
// A row that has seen nothing, because all is masked or there is nothing, has the state (-inf, 0,
// 0): the identity of the fold. It is kept as EMPTY, since (-inf) - (-inf) would be NaN.
//
// Beyond a row's context: scores are replaced, not multiplied, so NaN there is harmless; V is not
// read past the last context of the tile, and half of the last lane is cut off where that is odd.
#include "calls.h"
#include "fp8.h"
#include "simd.h"

namespace moonpool {
namespace {

constexpr int SPAN = 256;
constexpr int SEGMENT = 8 * SPAN;  // moonpool_engine/engine/ops.py has the same number
constexpr float EMPTY = -1e30f;    // below any score
constexpr float LOG2_E = 1.44269504f;
constexpr int ITEM_TILES = 56 / MAX_ROWS;
constexpr int ITEM_ROWS = ITEM_TILES * MAX_ROWS;

// What the tiles of one work item share, and where its temporaries lie.
template <class L>
struct Item {
    typedef typename L::T T;
    const AttendCall* call;
    const int32_t* table;
    const char* keys;  // of this kv head in block 0
    const char* values;
    int64_t value_dim;
    T* latent;      // V of one span, of keys that are values too: [SPAN / PACK][value_dim][PACK]
    int32_t* q;     // per tile [head_dim lanes][rows of the tile]
    float* out;     // [rows][value_dim], not yet divided by the sum
    float* folded;  // the same of the segments before
    float* scores;  // [rows of a tile][SPAN]
    T* weights;     // [rows of a tile][SPAN]
    int64_t context;  // most tokens any row of the item sees
};

// State of the rows of one tile. A vector holds one number of every row: MAX_ROWS < W.
struct Rows {
    int32_t limit[MAX_ROWS];  // tokens of context, own token included
    int32_t first[MAX_ROWS];  // the first token in the window
    float highest[W];         // score so far, times scale
    float rescale[W];         // of what was summed before this span
    alignas(64) float sums[MAX_ROWS][W];
    float folded_highest[MAX_ROWS];
    float folded_sum[MAX_ROWS];
};
static_assert(MAX_ROWS <= W && 2 * W <= STATE, "one lane per row");

// Adds (highest, sum, out) to what is folded; out may be folded itself.
MP_INLINE void fold_into(float& folded_highest, float& folded_sum, float* folded, float highest,
                         float sum, const float* out, int64_t d) {
    if (highest <= EMPTY) return;
    if (folded_highest <= EMPTY) {
        folded_highest = highest, folded_sum = sum;
        if (folded != out) memcpy(folded, out, d * sizeof(float));
        return;
    }
    const float now = folded_highest > highest ? folded_highest : highest;
    const vf a = exp2v(set1(folded_highest - now)), b = exp2v(set1(highest - now));
    float scales[2][W];
    store(scales[0], a), store(scales[1], b);
    folded_highest = now;
    folded_sum = folded_sum * scales[0][0] + sum * scales[1][0];
    for (int64_t j = 0; j < d; j += W)
        store(folded + j, add(mul(load(folded + j), a), mul(load(out + j), b)));
}

// The segment of one row is over.
MP_INLINE void end_segment(Rows& rows, int64_t r, float* out, float* folded, int64_t d) {
    fold_into(rows.folded_highest[r], rows.folded_sum[r], folded, rows.highest[r],
              sum(load(rows.sums[r])), out, d);
    rows.highest[r] = EMPTY;
    store(rows.sums[r], zero());
    memset(out, 0, d * sizeof(float));
}

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

// Puts the cap on the scores of a span, and -infinity before each row's window.
template <class L, int ROWS>
void bound(const Item<L>& it, const Rows& rows, int64_t begin, int width) {
    const float cap = it.call->soft_cap;
    for (int r = 0; r < ROWS; ++r) {
        float* scores = it.scores + r * SPAN;
        if (cap > 0) {
            const vf inside = set1(it.call->scale / cap), whole = set1(cap);
            for (int i = 0; i < width; i += W)
                store(scores + i, mul(tanhv(mul(load(scores + i), inside)), whole));
        }
        const int64_t unseen = least(rows.first[r] - begin, width);
        for (int64_t i = 0; i < unseen; ++i) scores[i] = -INFINITY;
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
    const int64_t d = it.value_dim, bt = c.block_tokens;
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
        const int64_t stop = c.latent ? end : least(end, (token / bt + 1) * bt);
        const char* block = it.values + it.table[token / bt] * c.block_bytes;
        const int32_t* v = (const int32_t*)block + (token % bt) / L::PACK * d + column;
        if (c.latent) v = (const int32_t*)it.latent + column;
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
    if (c.window || c.soft_cap > 0) bound<L, ROWS>(it, rows, begin, width);
    soften<L, ROWS>(it, rows, begin, width, (c.soft_cap > 0 ? 1.f : c.scale) * LOG2_E);
    int64_t column = 0;
    if (2 * ROWS <= MAX_ROWS)
        for (; column + 4 * W <= it.value_dim; column += 4 * W)
            blend<L, ROWS, 2 * ROWS <= MAX_ROWS ? 4 : 2>(it, rows, out, column, begin, end,
                                                         2 * fetch_two);
    for (; column + 2 * W <= it.value_dim; column += 2 * W)
        blend<L, ROWS, 2>(it, rows, out, column, begin, end, fetch_two);
    if (column < it.value_dim) blend<L, ROWS, 1>(it, rows, out, column, begin, end, fetch_one);
}

template <class L>
using TileFn = void (*)(const Item<L>&, Rows&, const int32_t*, float*, int64_t, bool);

template <class L, int ROWS = MAX_ROWS>
TileFn<L> tile_for(int rows) {
    if constexpr (ROWS == 0)
        __builtin_trap();
    else
        return rows == ROWS ? tile<L, ROWS> : tile_for<L, ROWS - 1>(rows);
}

// Rows [first, first + count) of a sequence and kv head; row r is query head r % group of its token
// r / group.
template <class L>
class Work {
    typedef typename L::T T;

public:
    Work(const AttendCall& call, const Part& part, int64_t sequence, int64_t kv_head, int64_t first,
         int64_t count)
        : own_(widened(call)), c(own_), from_(call), p(part), kv_head_(kv_head), first_(first), count_(count),
          group_(call.heads / call.kv_heads), row0_(call.row_starts[sequence]),
          begin_(part.begins ? part.begins[sequence] : 0),
          end_(part.ends ? part.ends[sequence] : INT32_MAX) {
        static thread_local Scratch scratch;
        const int64_t d = c.head_dim, head_elements = d * c.block_tokens;
        const int64_t kept = c.latent * SPAN * sizeof(T), wide = d * SPAN * sizeof(T);
        const int64_t spans = call.table_width * call.block_tokens / SPAN + 2;
        const int64_t eight = call.fp8 ? 2 * wide + 2 * SPAN * 8 + spans * 4 : 0;
        char* memory = scratch.take(ITEM_ROWS * d * 12 + MAX_ROWS * SPAN * 8 + kept + eight);
        it.value_dim = c.latent ? c.latent : d;
        it.call = &c;
        it.table = c.block_tables + sequence * c.table_width;
        it.keys = c.blocks + kv_head * head_elements * sizeof(T);
        it.values = it.keys + (c.latent ? 0 : c.kv_heads * head_elements * sizeof(T));
        it.scores = (float*)memory;
        it.weights = (T*)(memory + MAX_ROWS * SPAN * 4);
        it.out = (float*)(memory + MAX_ROWS * SPAN * 8);
        it.folded = it.out + ITEM_ROWS * d;
        it.q = (int32_t*)(it.folded + ITEM_ROWS * d);
        it.latent = (T*)(it.q + ITEM_ROWS * d);
        if (call.fp8) {
            char* after = (char*)it.latent + kept;
            table_ = it.table;
            it.keys = after;
            it.values = c.latent ? it.keys : after + wide;
            factors_ = (float*)(after + 2 * wide);
            it.table = (const int32_t*)memset((char*)factors_ + 2 * SPAN * 8, 0, spans * 4);
        }
        it.context = 0;
        first_seen_ = INT32_MAX;
        tiles_ = ceil_div(count, MAX_ROWS);
        const int64_t size = count / tiles_, larger = count % tiles_;
        for (int64_t i = 0; i <= tiles_; ++i) start_[i] = i * size + least(i, larger);
    }

    void run() {
        const int64_t d = c.head_dim, lanes = d / L::PACK;
        for (int64_t i = 0; i < tiles_; ++i) take_rows(i);
        // Spans before all windows would leave the states as they are: see `Rows`.
        const int64_t seen = first_seen_ / SPAN * SPAN;
        for (int64_t begin = seen > begin_ ? seen : begin_; begin < it.context; begin += SPAN) {
            if (begin && begin % SEGMENT == 0) end_segments();
            if (c.fp8) widen_span(begin);
            if (c.latent) turn_span(begin);
            for (int64_t i = 0; i < tiles_; ++i)
                tile_for<L>((int)(start_[i + 1] - start_[i]))(
                    it, rows_[i], it.q + start_[i] * lanes, it.out + start_[i] * it.value_dim, begin,
                    i == 0);
        }
        if (p.to) return leave();
        for (int64_t i = 0; i < tiles_; ++i) {
            for (int64_t r = start_[i]; r < start_[i + 1]; ++r) give(rows_[i], r - start_[i], r);
        }
    }

private:
    int64_t head(int64_t r) const {  // its number among all heads of all rows
        const int64_t row = first_ + r;
        return (row0_ + row / group_) * c.heads + kv_head_ * group_ + row % group_;
    }

    // The call as it is for blocks that hold one span each, all at the same address.
    static AttendCall widened(AttendCall call) {
        if (call.fp8) call.block_tokens = SPAN, call.block_bytes = 0;
        return call;
    }

    // Widens K and V of one span from 8 bits into memory of this thread, in the same order. Tokens
    // are taken by 16, as blocks are: those past the context are not read later.
    void widen_span(int64_t begin) {
        constexpr int P = L::PACK;
        const int64_t d = c.head_dim, bt = from_.block_tokens, side = c.kv_heads * d * bt;
        const int64_t end = least(begin + SPAN, it.context);
        for (int64_t token = begin; token < end; token = (token / bt + 1) * bt) {
            const int64_t at = token - begin, offset = token % bt;
            const int64_t n = ceil_div(least(end - token, bt - offset), 16) * 16;
            const uint8_t* block =
                (const uint8_t*)from_.blocks + table_[token / bt] * from_.block_bytes;
            const uint8_t* powers =
                block + (c.latent ? 1 : 2) * side + kv_head_ * bt + offset;
            for (int64_t i = 0; i < n * P; ++i)
                factors_[i] = power_of(powers[i / P]) * WIDENED;
            const uint8_t* k = block + kv_head_ * d * bt + offset * P;
            for (int64_t lane = 0; lane < d / P; ++lane) {
                T* to = (T*)it.keys + (lane * SPAN + at) * P;
                widen(to, k + lane * bt * P, factors_, n * P, W);
            }
            if (c.latent) continue;
            powers += c.kv_heads * bt;
            const uint8_t* v = block + side + kv_head_ * d * bt + offset / P * d * P;
            for (int64_t i = 0; i < n; i += P) {
                float pair[W];
                for (int j = 0; j < W; ++j) pair[j] = power_of(powers[i + j % P]) * WIDENED;
                widen((T*)it.values + (at + i) * d, v + i * d, pair, d * P, 0);
            }
        }
    }

    // to[i] = from[i] * factors[i], or with a step of 0 the same W factors for all.
    static void widen(T* to, const uint8_t* from, const float* factors, int64_t n, int64_t step) {
        for (int64_t i = 0; i < n; i += W, factors += step)
            L::store(to + i, mul(widen_e4m3(from + i), load(factors)));
    }

    // Copies the latents of one span from the order of K to that of V.
    void turn_span(int64_t begin) {
        constexpr int P = L::PACK;
        const int64_t dv = c.latent, bt = c.block_tokens, end = least(begin + SPAN, it.context);
        const int64_t rope = c.head_dim - dv;
        for (int64_t token = begin; token < end; ++token) {
            const T* k = (const T*)(it.keys + it.table[token / bt] * c.block_bytes) + token % bt * P;
            T* v = it.latent + (token - begin) / P * dv * P + (token - begin) % P;
            for (int64_t j = 0; j < dv; ++j)
                v[j * P] = k[(rope + j) / P * bt * P + (rope + j) % P];
        }
        if ((end - begin) % P)  // the last lane's other half
            for (int64_t j = 0; j < dv; ++j)
                it.latent[((end - begin) / P * dv + j) * P + P - 1] = 0;
    }

    void take_rows(int64_t i) {
        const int64_t d = c.head_dim, lanes = d / L::PACK, n = start_[i + 1] - start_[i];
        const int64_t dv = it.value_dim;
        Rows& rows = rows_[i];
        store(rows.highest, set1(EMPTY));
        for (int64_t r = 0; r < n; ++r) {
            const int64_t at = start_[i] + r;
            const int64_t limit = c.positions[row0_ + (first_ + at) / group_] + 1;
            rows.limit[r] = (int32_t)least(limit, end_);
            rows.first[r] = c.window && limit > c.window ? (int32_t)(limit - c.window) : 0;
            first_seen_ = least(first_seen_, rows.first[r]);
            if (rows.limit[r] > it.context) it.context = rows.limit[r];
            const char* from = c.q + head(at) * d * sizeof(T);
            for (int64_t k = 0; k < lanes; ++k)
                memcpy(it.q + start_[i] * lanes + k * n + r, from + 4 * k, 4);
            float *out = it.out + at * dv, *folded = it.folded + at * dv;
            if (p.from) {
                const float* state = p.from + head(at) * (STATE + 2 * dv);
                rows.highest[r] = state[0];
                rows.folded_highest[r] = state[1];
                rows.folded_sum[r] = state[2];
                memcpy(rows.sums[r], state + 16, W * sizeof(float));
                memcpy(out, state + STATE, dv * sizeof(float));
                memcpy(folded, state + STATE + dv, dv * sizeof(float));
            } else {
                rows.folded_highest[r] = EMPTY;
                rows.folded_sum[r] = 0;
                store(rows.sums[r], zero());
                memset(out, 0, dv * sizeof(float));
            }
        }
    }

    void end_segments() {
        const int64_t d = it.value_dim;
        for (int64_t i = 0; i < tiles_; ++i) {
            for (int64_t r = start_[i]; r < start_[i + 1]; ++r)
                end_segment(rows_[i], r - start_[i], it.out + r * d, it.folded + r * d, d);
        }
    }

    void leave() {
        const int64_t d = it.value_dim;
        for (int64_t i = 0; i < tiles_; ++i) {
            for (int64_t at = start_[i]; at < start_[i + 1]; ++at) {
                const int64_t r = at - start_[i];
                float* state = p.to + head(at) * (STATE + 2 * d);
                state[0] = rows_[i].highest[r];
                state[1] = rows_[i].folded_highest[r];
                state[2] = rows_[i].folded_sum[r];
                memcpy(state + 16, rows_[i].sums[r], W * sizeof(float));
                memcpy(state + STATE, it.out + at * d, d * sizeof(float));
                memcpy(state + STATE + d, it.folded + at * d, d * sizeof(float));
            }
        }
    }

    void give(Rows& rows, int64_t r, int64_t at) {
        const int64_t d = it.value_dim;
        const float* out = it.out + at * d;
        float highest = rows.highest[r], total = sum(load(rows.sums[r]));
        if (rows.folded_highest[r] > EMPTY) {
            end_segment(rows, r, it.out + at * d, it.folded + at * d, d);
            out = it.folded + at * d;
            highest = rows.folded_highest[r], total = rows.folded_sum[r];
        }
        if (p.partials) {
            float* to = p.partials + head(at) * (d + 2);
            to[0] = highest <= EMPTY ? -INFINITY : highest;
            to[1] = total;
            memcpy(to + 2, out, d * sizeof(float));
        } else {
            float fade = 1.f;
            if (c.sinks) sink(c.sinks[head(at) % c.heads] * LOG2_E, highest, total, fade);
            divide((T*)c.out + head(at) * d, out, total, d, fade);
        }
    }

public:
    // Adds the weight of a sink to the sum. What was summed counts `fade` times.
    static void sink(float score, float highest, float& total, float& fade) {
        const float now = score > highest ? score : highest;
        float scales[2][W];
        store(scales[0], exp2v(set1(highest - now))), store(scales[1], exp2v(set1(score - now)));
        fade = scales[0][0];
        total = total * fade + scales[1][0];
    }

    static void divide(T* to, const float* out, float total, int64_t d, float fade = 1.f) {
        const vf whole = set1(total > 0 ? fade / total : 0.f);
        for (int64_t j = 0; j < d; j += W) L::store(to + j, mul(load(out + j), whole));
    }

private:
    const AttendCall own_;
    const AttendCall& c;
    const AttendCall& from_;  // as it was given
    const Part& p;
    const int32_t* table_ = nullptr;  // of the blocks in 8 bits
    float* factors_ = nullptr;        // of the tokens of one block
    const int64_t kv_head_, first_, count_, group_, row0_, begin_, end_;
    Item<L> it;
    int64_t tiles_, first_seen_;
    int64_t start_[ITEM_TILES + 1];
    Rows rows_[ITEM_TILES];
};

// Whether every block that the rows will read is there.
bool sound(const AttendCall& c, const Part& p) {
    for (int64_t s = 0; s < c.sequences; ++s) {
        int64_t context = 0;
        for (int64_t row = c.row_starts[s]; row < c.row_starts[s + 1]; ++row) {
            if (c.positions[row] < 0) return false;
            if (c.positions[row] >= context) context = c.positions[row] + 1;
        }
        if (p.ends && p.ends[s] < context) context = p.ends[s];
        const int64_t begin = p.begins ? p.begins[s] : 0;
        if (begin < 0 || begin % SPAN) return false;
        const int64_t blocks = ceil_div(context, c.block_tokens);
        if (blocks > c.table_width) return false;
        for (int64_t i = begin / c.block_tokens; i < blocks; ++i) {
            const int64_t block = c.block_tables[s * c.table_width + i];
            if (block < 0 || block >= c.num_blocks) return false;
        }
    }
    return true;
}

// Writes nothing and returns 1 if a row's context lies outside the tables.
template <class L>
int attend(const AttendCall& c, const Part& p, int threads) {
    if (!sound(c, p)) return 1;
    const int64_t group = c.heads / c.kv_heads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t s = 0; s < c.sequences; ++s) {
        const int64_t rows = (c.row_starts[s + 1] - c.row_starts[s]) * group;
        const int64_t items = ceil_div(rows, ITEM_ROWS);
#pragma omp for schedule(dynamic) nowait
        for (int64_t i = 0; i < items * c.kv_heads; ++i) {
            const int64_t part = i % items, first = rows * part / items;
            Work<L>(c, p, s, i / items, first, rows * (part + 1) / items - first).run();
        }
    }
    return 0;
}

struct MergeCall {
    const float* partials;  // [partials][heads][head_dim + 2]
    const float* sinks;     // [heads]: a score that takes weight but has no value; null: none
    const int32_t* order;   // of the partials: those of each row, in the order of their tokens
    const int32_t* starts;  // [rows + 1], into order
    char* out;              // [rows][heads][head_dim]
    int64_t rows, heads, head_dim, num_partials;
};

// Folds every row's partials in their order. Returns 1, writing nothing, if one is not there.
template <class L>
int merge(const MergeCall& c) {
    const int64_t d = c.head_dim, size = d + 2;
    for (int64_t i = c.starts[0]; i < c.starts[c.rows]; ++i)
        if (c.order[i] < 0 || c.order[i] >= c.num_partials) return 1;
    static thread_local Scratch scratch;
    float* folded = (float*)scratch.take(d * sizeof(float));
    for (int64_t row = 0; row < c.rows; ++row) {
        for (int64_t h = 0; h < c.heads; ++h) {
            float highest = EMPTY, sum = 0;
            memset(folded, 0, d * sizeof(float));
            for (int64_t i = c.starts[row]; i < c.starts[row + 1]; ++i) {
                const float* from = c.partials + (c.order[i] * c.heads + h) * size;
                fold_into(highest, sum, folded, from[0], from[1], from + 2, d);
            }
            float fade = 1.f;
            if (c.sinks) Work<L>::sink(c.sinks[h] * LOG2_E, highest, sum, fade);
            Work<L>::divide((typename L::T*)c.out + (row * c.heads + h) * d, folded, sum, d, fade);
        }
    }
    return 0;
}

}  // namespace
}  // namespace moonpool

#define MP_ATTENTION(L, type)                                                                      \
    MP_EXPORT(moonpool_attend_##type)(const moonpool::AttendCall* call, int threads) {             \
        return moonpool::attend<moonpool::L>(*call, moonpool::Part(), threads);                    \
    }                                                                                              \
    MP_EXPORT(moonpool_attend_part_##type)(const moonpool::PartCall* call, int threads) {          \
        return moonpool::attend<moonpool::L>(call->call, call->part, threads);                     \
    }                                                                                              \
    MP_EXPORT(moonpool_merge_##type)(const moonpool::MergeCall* call, int) {                       \
        return moonpool::merge<moonpool::L>(*call);                                                \
    }

MP_ATTENTION(F32, f32)
MP_ATTENTION(B16, b16)
