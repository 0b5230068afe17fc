// Linear attention by the gated delta rule; moonpool_engine/engine/delta/attention.py says what a state is and where it
// lies, moonpool_engine/engine/ops.py what is computed.
//
// Rows of a sequence are taken one after the other, heads apart from each other: so a row's
// arithmetic depends neither on the batch, nor on the chunks of its prompt, nor on the threads.
#include "calls.h"
#include "simd.h"

namespace moonpool {
namespace {

constexpr int MAX_DIM = 256;
constexpr int64_t MOST_TAPS = 8;
constexpr float UNIT_EPS = 1e-6f;

MP_INLINE float silu(float x) { return x / (1.f + expf(-x)); }
MP_INLINE float softplus(float x) { return (x > 0.f ? x : 0.f) + log1pf(expf(-fabsf(x))); }

struct Sizes {
    int64_t keys, values, channels, width, head_floats;
    explicit Sizes(const DeltaCall& c)
        : keys(c.key_heads * c.key_dim),
          values(c.value_heads * c.value_dim),
          channels(2 * keys + values),
          width(channels + values + 2 * c.value_heads),
          head_floats(c.key_dim * c.value_dim) {}
};

// The state in a block of the layer: the number of its tokens, its heads, its newest rows.
struct State {
    char* at;
    int32_t* num_tokens() const { return (int32_t*)at; }
    float* head(int64_t h, const Sizes& z) const {
        return (float*)at + DELTA_HEAD + h * z.head_floats;
    }
    float* rows(const DeltaCall& c, const Sizes& z) const { return head(c.value_heads, z); }
};

MP_INLINE State state_of(const DeltaCall& c, int64_t s, int64_t num_tokens) {
    const int64_t place = num_tokens > 0 ? (num_tokens - 1) / c.block_tokens : 0;
    return State{c.blocks + c.block_tables[s * c.table_width + place] * c.block_bytes};
}

MP_INLINE int64_t start_of(const DeltaCall& c, int64_t s) { return c.positions[c.row_starts[s]]; }

// Whether the sequence goes on from the state in its blocks; else it begins with zeros.
MP_INLINE bool continues(const DeltaCall& c, int64_t s) {
    const int64_t start = start_of(c, s);
    return start > 0 && *state_of(c, s, start).num_tokens() == start;
}

bool has_tables(const DeltaCall& c) {
    for (int64_t s = 0; s < c.sequences; ++s) {
        const int64_t first = c.row_starts[s], end = c.row_starts[s + 1];
        if (first >= end || c.positions[first] < 0) return false;
        const int64_t blocks = ceil_div(c.positions[end - 1] + 1, c.block_tokens);
        if (blocks > c.table_width) return false;
        for (int64_t i = 0; i < blocks; ++i) {
            const int64_t block = c.block_tables[s * c.table_width + i];
            if (block < 0 || block >= c.num_blocks) return false;
        }
    }
    return true;
}

// The convolution of one row, and silu: [channels] floats. Of the rows before the step's first,
// `old` has the newest; null: they are zero.
template <class L>
void convolve(const DeltaCall& c, const Sizes& z, const typename L::T* x, int64_t row,
              const float* old, float* to) {
    const int64_t before = c.taps - 1;
    for (int64_t i = 0; i < z.channels; i += W) {
        const int n = (int)least(z.channels - i, W);
        vf total = zero();
        for (int64_t tap = 0; tap < c.taps; ++tap) {
            const int64_t from = row - before + tap;  // a row of the step, or of those before
            vf value = zero();
            if (from >= 0) value = load_first<L>(x + from * z.width + i, n);
            else if (old) value = load_first<F32>(old + (before + from) * z.channels + i, n);
            total = fma(value, load_first<F32>(c.tap_weights + tap * z.channels + i, n), total);
        }
        const vf e = expv(sub(zero(), min(max(total, set1(-88.f)), set1(88.f))));
        store_first<F32>(to + i, div(total, add(set1(1.f), e)), n);
    }
}

// The newest rows of q, k and v when `num_rows` rows of the step have been taken. In place, `to`
// may be `old`: what is read lies behind what is written.
template <class L>
void keep_rows(const DeltaCall& c, const Sizes& z, const typename L::T* x, int64_t num_rows,
               const float* old, float* to) {
    const int64_t before = c.taps - 1;
    for (int64_t slot = 0; slot < before; ++slot) {
        const int64_t from = num_rows - before + slot;
        for (int64_t i = 0; i < z.channels; i += W) {
            const int n = (int)least(z.channels - i, W);
            vf value = zero();
            if (from >= 0) value = load_first<L>(x + from * z.width + i, n);
            else if (old) value = load_first<F32>(old + (before + from) * z.channels + i, n);
            store_first<F32>(to + slot * z.channels + i, value, n);
        }
    }
}

MP_INLINE void unit(const float* x, int64_t size, float factor, float* to) {
    vf squares = zero();
    for (int64_t i = 0; i < size; i += W) squares = fma(load(x + i), load(x + i), squares);
    const vf scale = set1(factor / sqrtf(sum(squares) + UNIT_EPS));
    for (int64_t i = 0; i < size; i += W) store(to + i, mul(load(x + i), scale));
}

// state = state * decay + k (v - decay * k state) * beta, out = q state, for VECS vectors of
// columns.
template <int VECS>
MP_INLINE void columns(float* state, int64_t stride, int64_t keys, const float* q, const float* k,
                       const float* v, float decay, float beta, float* out) {
    vf known[VECS], change[VECS], read[VECS];
#pragma GCC unroll 4
    for (int j = 0; j < VECS; ++j) known[j] = read[j] = zero();
    for (int64_t i = 0; i < keys; ++i) {
        const vf key = set1(k[i]);
#pragma GCC unroll 4
        for (int j = 0; j < VECS; ++j) known[j] = fma(load(state + i * stride + j * W), key, known[j]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < VECS; ++j)
        change[j] = mul(sub(load(v + j * W), mul(known[j], set1(decay))), set1(beta));
    for (int64_t i = 0; i < keys; ++i) {
        const vf key = set1(k[i]), query = set1(q[i]);
#pragma GCC unroll 4
        for (int j = 0; j < VECS; ++j) {
            float* at = state + i * stride + j * W;
            const vf next = fma(key, change[j], mul(load(at), set1(decay)));
            store(at, next);
            read[j] = fma(next, query, read[j]);
        }
    }
#pragma GCC unroll 4
    for (int j = 0; j < VECS; ++j) store(out + j * W, read[j]);
}

// One value head over all rows of a sequence. mixed: [rows][channels], convolved. A state that is
// continued in its own block is changed in place, and `scratch` is not used.
template <class L>
void run_head(const DeltaCall& c, const Sizes& z, int64_t s, int64_t h, const float* mixed,
              float* scratch) {
    typedef typename L::T T;
    const int64_t first = c.row_starts[s], rows = c.row_starts[s + 1] - first;
    const int64_t start = start_of(c, s), size = c.value_dim;
    const bool in_place = start / c.block_tokens == (start + rows - 1) / c.block_tokens;
    float* state = in_place ? state_of(c, s, start + rows).head(h, z) : scratch;
    const float* from = continues(c, s) ? state_of(c, s, start).head(h, z) : nullptr;
    if (!from) memset(state, 0, z.head_floats * 4);
    else if (from != state) memcpy(state, from, z.head_floats * 4);
    const int64_t key_head = c.tiled ? h % c.key_heads : h / (c.value_heads / c.key_heads);
    const float query_scale = 1.f / sqrtf((float)c.key_dim);
    float q[MAX_DIM], k[MAX_DIM], out[MAX_DIM];
    for (int64_t row = 0; row < rows; ++row) {
        const float* own = mixed + (first + row) * z.channels;
        const T* x = (const T*)c.x + (first + row) * z.width + z.channels;
        unit(own + key_head * c.key_dim, c.key_dim, query_scale, q);
        unit(own + z.keys + key_head * c.key_dim, c.key_dim, 1.f, k);
        const float* v = own + 2 * z.keys + h * size;
        float gates[2];
        const T pair[2] = {x[z.values + h], x[z.values + c.value_heads + h]};
        float wide[W];
        store(wide, load_first<L>(pair, 2));
        gates[0] = 1.f / (1.f + expf(-wide[0]));
        gates[1] = expf(-c.decay[h] * softplus(wide[1] + c.step_bias[h]));
        int64_t j = 0;
        for (; j + 4 * W <= size; j += 4 * W)
            columns<4>(state + j, size, c.key_dim, q, k, v + j, gates[1], gates[0], out + j);
        for (; j < size; j += W)
            columns<1>(state + j, size, c.key_dim, q, k, v + j, gates[1], gates[0], out + j);
        vf squares = zero();
        for (j = 0; j < size; j += W) squares = fma(load(out + j), load(out + j), squares);
        const vf scale = set1(1.f / sqrtf(sum(squares) / (float)size + c.eps));
        T* to = (T*)c.out + (first + row) * z.values + h * size;
        for (j = 0; j < size; j += W) {
            const vf gate = load_first<L>(x + h * size + j, W);
            const vf e = expv(sub(zero(), min(max(gate, set1(-88.f)), set1(88.f))));
            const vf normed = mul(mul(load(out + j), scale), load(c.norm + j));
            store_first<L>(to + j, mul(normed, div(gate, add(set1(1.f), e))), W);
        }
        const int64_t taken = start + row + 1;
        if (!in_place && (taken % c.block_tokens == 0 || row == rows - 1))
            memcpy(state_of(c, s, taken).head(h, z), state, z.head_floats * 4);
    }
}

// 1: rows lie outside their tables; 2: a block has another state than its step continues from.
template <class L>
int delta_rule(const DeltaCall& c, int threads) {
    typedef typename L::T T;
    if (c.key_dim > MAX_DIM || c.value_dim > MAX_DIM || c.taps > MOST_TAPS) return 1;
    if (c.key_dim % 16 || c.value_dim % 16 || c.value_heads % c.key_heads || !has_tables(c)) return 1;
    const Sizes z(c);
    for (int64_t s = 0; s < c.sequences; ++s) {
        const bool checked = !c.unchecked || !c.unchecked[s];
        if (checked && start_of(c, s) > 0 && !continues(c, s)) return 2;
    }
    const int64_t rows = c.row_starts[c.sequences];
    static thread_local Scratch scratch;
    float* mixed = (float*)scratch.take((size_t)rows * z.channels * 4);
    const bool many = threads > 1;
#pragma omp parallel num_threads(threads) if (many)
    {
        for (int64_t s = 0; s < c.sequences; ++s) {
            const int64_t first = c.row_starts[s], end = c.row_starts[s + 1];
            const float* old = continues(c, s) ? state_of(c, s, start_of(c, s)).rows(c, z) : nullptr;
            const T* x = (const T*)c.x + first * z.width;
#pragma omp for schedule(static) nowait
            for (int64_t row = first; row < end; ++row)
                convolve<L>(c, z, x, row - first, old, mixed + row * z.channels);
        }
#pragma omp barrier
        static thread_local Scratch own;
        float* state = (float*)own.take((size_t)z.head_floats * 4);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < c.sequences * c.value_heads; ++i)
            run_head<L>(c, z, i / c.value_heads, i % c.value_heads, mixed, state);
    }
    for (int64_t s = 0; s < c.sequences; ++s) {
        const int64_t first = c.row_starts[s], num_rows = c.row_starts[s + 1] - first;
        const int64_t start = start_of(c, s), end = start + num_rows;
        const float* old = continues(c, s) ? state_of(c, s, start).rows(c, z) : nullptr;
        const T* x = (const T*)c.x + first * z.width;
        // The last block first: the first one may be where `old` lies.
        for (int64_t taken = end; taken > start;) {
            const State to = state_of(c, s, taken);
            keep_rows<L>(c, z, x, taken - start, old, to.rows(c, z));
            *to.num_tokens() = (int32_t)taken;
            taken = (taken - 1) / c.block_tokens * c.block_tokens;
        }
    }
    return 0;
}

}  // namespace
}  // namespace moonpool

using namespace moonpool;

MP_EXPORT(moonpool_delta_rule_f32)(const DeltaCall* call, int threads) {
    return delta_rule<F32>(*call, threads);
}
MP_EXPORT(moonpool_delta_rule_b16)(const DeltaCall* call, int threads) {
    return delta_rule<B16>(*call, threads);
}
