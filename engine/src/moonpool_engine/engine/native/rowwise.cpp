// What a decoder layer does to one row at a time: norms, the gate, rope and the store into
// blocks.
//
// A row's arithmetic depends on the row's width only. Inputs are widened to float, and rounded
// once, when the result is stored.
#include "calls.h"
#include "fp8.h"
#include "simd.h"

namespace moonpool {
namespace {

// Rows worth a second thread: below this many elements a parallel region costs more than it saves.
constexpr int64_t PARALLEL_ELEMENTS = 1 << 15;

MP_INLINE bool worth_threads(int threads, int64_t elements) {
    return threads > 1 && elements >= PARALLEL_ELEMENTS;
}

// 1 / sqrt(mean(x^2) + eps) of `width` values, in float, four chains of sums.
template <class L>
MP_INLINE float inverse_rms(const typename L::T* x, int64_t width, float eps) {
    vf sums[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + 4 * W <= width; i += 4 * W) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const vf v = L::load(x + i + j * W);
            sums[j] = fma(v, v, sums[j]);
        }
    }
    for (; i < width; i += W) {
        const vf v = load_first<L>(x + i, (int)least(width - i, W));
        sums[0] = fma(v, v, sums[0]);
    }
    const float total = sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    return 1.f / sqrtf(total / (float)width + eps);
}

template <class L>
MP_INLINE void scale_row(const typename L::T* x, const float* weight, typename L::T* y,
                         int64_t width, float eps) {
    const vf scale = set1(inverse_rms<L>(x, width, eps));
    for (int64_t i = 0; i < width; i += W) {
        const int n = (int)least(width - i, W);
        const vf normed = mul(load_first<L>(x + i, n), scale);
        store_first<L>(y + i, mul(normed, load_first<F32>(weight + i, n)), n);
    }
}

template <class L>
void rms_norm(const void* x, const void* weight, void* y, int64_t rows, int64_t width, float eps,
              int threads) {
    typedef typename L::T T;
    const bool many = worth_threads(threads, rows * width);
#pragma omp parallel for schedule(static) num_threads(threads) if (many)
    for (int64_t r = 0; r < rows; ++r)
        scale_row<L>((const T*)x + r * width, (const float*)weight, (T*)y + r * width, width, eps);
}

template <class L>
void add_rms_norm(const void* x, void* residual, const void* weight, void* y, int64_t rows,
                  int64_t width, float eps, int threads) {
    typedef typename L::T T;
    const bool many = worth_threads(threads, rows * width);
#pragma omp parallel for schedule(static) num_threads(threads) if (many)
    for (int64_t r = 0; r < rows; ++r) {
        const T* from = (const T*)x + r * width;
        T* to = (T*)residual + r * width;
        for (int64_t i = 0; i < width; i += W) {
            const int n = (int)least(width - i, W);
            store_first<L>(to + i, add(load_first<L>(to + i, n), load_first<L>(from + i, n)), n);
        }
        scale_row<L>(to, (const float*)weight, (T*)y + r * width, width, eps);
    }
}

enum Gate { SILU = 0, GELU_TANH = 1, CLAMPED = 2 };  // moonpool_engine/engine/native/ops.py has the same numbers

template <class L>
void glu(const void* gate_up, void* y, int64_t rows, int64_t width, int kind, float alpha,
         float limit, int threads) {
    typedef typename L::T T;
    const bool many = worth_threads(threads, rows * width);
#pragma omp parallel for schedule(static) num_threads(threads) if (many)
    for (int64_t r = 0; r < rows; ++r) {
        const T* gate = (const T*)gate_up + r * 2 * width;
        const T* up = gate + width;
        T* to = (T*)y + r * width;
        for (int64_t i = 0; i < width; i += W) {
            const int n = (int)least(width - i, W);
            vf g = load_first<L>(gate + i, n), u = load_first<L>(up + i, n);
            vf steep = g;
            if (kind == CLAMPED) {
                g = min(g, set1(limit));
                u = add(max(min(u, set1(limit)), set1(-limit)), set1(1.f));
                steep = mul(g, set1(alpha));
            }
            if (kind == GELU_TANH) {  // gelu(g) is about g * sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3))
                const vf cube = mul(mul(mul(g, set1(0.044715f)), g), g);
                steep = mul(add(g, cube), set1(1.5957691216f));
            }
            const vf e = expv(sub(zero(), min(max(steep, set1(-88.f)), set1(88.f))));
            const vf active = div(g, add(set1(1.f), e));
            store_first<L>(to + i, mul(active, u), n);
        }
    }
}

void soft_cap(const float* x, float* y, int64_t count, float cap, int threads) {
    const vf whole = set1(cap), part = set1(1.f / cap);
    const bool many = worth_threads(threads, count);
#pragma omp parallel for schedule(static) num_threads(threads) if (many)
    for (int64_t i = 0; i < count; i += W) {
        const int n = (int)least(count - i, W);
        store_first<F32>(y + i, mul(tanhv(mul(load_first<F32>(x + i, n), part)), whole), n);
    }
}

constexpr int MAX_HEAD_DIM = 1024;

struct RopeCall {
    const char* qkv;
    char* q;
    char* blocks;  // of this layer: slice of block b at b * block_bytes
    const float* cos;
    const float* sin;
    const void* q_weight;  // float; null: no norm of q and k
    const void* k_weight;
    const int32_t* positions;
    const int32_t* row_starts;
    const int32_t* block_tables;
    int64_t block_bytes, num_blocks, table_width, sequences;
    int64_t heads, kv_heads, head_dim, rotary_half, max_positions, block_tokens;
    int64_t latent;  // not 0: keys are values too, and there is no V
    int64_t fp8;     // 1: see fp8.h
    float eps;
};

// One head, widened, normed (if asked) and rotated: the result in out[head_dim].
template <class L>
MP_INLINE void turn_head(const RopeCall& c, const typename L::T* x, const float* weight,
                         int64_t position, float* out) {
    const int64_t d = c.head_dim, half = c.rotary_half;
    for (int64_t i = 0; i < d; i += W) store(out + i, L::load(x + i));
    if (weight) {
        const vf scale = set1(inverse_rms<L>(x, d, c.eps));
        for (int64_t i = 0; i < d; i += W)
            store(out + i, mul(mul(load(out + i), scale), load(weight + i)));
    }
    const float* cos = c.cos + position * half;
    const float* sin = c.sin + position * half;
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        const vf a = load(out + i), b = load(out + half + i);
        const vf co = load(cos + i), si = load(sin + i);
        store(out + i, sub(mul(a, co), mul(b, si)));
        store(out + half + i, add(mul(b, co), mul(a, si)));
    }
    for (; i < half; ++i) {
        const float a = out[i], b = out[half + i];
        out[i] = a * cos[i] - b * sin[i];
        out[half + i] = b * cos[i] + a * sin[i];
    }
}

// Where one row of K and V goes: into its block, or into rows of a buffer.
template <class L>
MP_INLINE void put_key(typename L::T* to, const typename L::T* k, int64_t d, int64_t bt) {
    // K [head_dim / PACK][block_tokens][PACK]
    for (int64_t i = 0; i < d / L::PACK; ++i)
        memcpy((char*)to + i * bt * 4, k + i * L::PACK, 4);
}
template <class L>
MP_INLINE void put_value(typename L::T* to, const typename L::T* v, int64_t d) {
    // V [block_tokens / PACK][head_dim][PACK]
    for (int64_t i = 0; i < d; ++i) to[i * L::PACK] = v[i];
}

// Q of one row, and its K, head by head, to `key`: both normed (if asked) and rotated.
template <class L, class PutKey>
MP_INLINE const typename L::T* rope_heads(const RopeCall& c, int64_t row, PutKey key) {
    typedef typename L::T T;
    const int64_t d = c.head_dim, position = c.positions[row];
    const T* x = (const T*)c.qkv + row * (c.heads + (c.latent ? 1 : 2) * c.kv_heads) * d;
    float turned[MAX_HEAD_DIM];
    T* q = (T*)c.q + row * c.heads * d;
    for (int64_t h = 0; h < c.heads; ++h, x += d, q += d) {
        turn_head<L>(c, x, (const float*)c.q_weight, position, turned);
        for (int64_t i = 0; i < d; i += W) L::store(q + i, load(turned + i));
    }
    T narrow[MAX_HEAD_DIM];
    for (int64_t h = 0; h < c.kv_heads; ++h, x += d) {
        turn_head<L>(c, x, (const float*)c.k_weight, position, turned);
        for (int64_t i = 0; i < d; i += W) L::store(narrow + i, load(turned + i));
        key(h, narrow);
    }
    return x;  // V
}

// The place of one row in the blocks of a call: where a head's K and V are put. The call is a
// RopeCall or a StoreCall.
template <class L>
struct Place {
    typedef typename L::T T;
    const int64_t d, bt, offset, kv_heads;
    char* slice;

    template <class Call>
    Place(const Call& c, int64_t row, int64_t sequence)
        : d(c.head_dim), bt(c.block_tokens), offset(c.positions[row] % bt), kv_heads(c.kv_heads),
          slice(c.blocks + c.block_bytes *
                c.block_tables[sequence * c.table_width + c.positions[row] / bt]) {}

    void key(int64_t h, const T* k) const {
        put_key<L>((T*)slice + offset * L::PACK + h * d * bt, k, d, bt);
    }
    void value(int64_t h, const T* v) const {
        T* to = (T*)slice + (kv_heads + h) * d * bt;
        put_value<L>(to + offset / L::PACK * d * L::PACK + offset % L::PACK, v, d);
    }
};

// The same in blocks of 8 bits. `sides`: 1 if keys are values too.
template <class L>
struct PlaceFp8 : Place<L> {
    typedef typename L::T T;
    using Place<L>::d, Place<L>::bt, Place<L>::offset, Place<L>::kv_heads;
    uint8_t *bytes_at, *powers;
    float wide[MAX_HEAD_DIM];
    uint8_t bytes[MAX_HEAD_DIM];

    template <class Call>
    PlaceFp8(const Call& c, int64_t row, int64_t sequence)
        : Place<L>(c, row, sequence), bytes_at((uint8_t*)this->slice),
          powers(bytes_at + (c.latent ? 1 : 2) * kv_heads * d * bt + offset) {}

    void key(int64_t h, const T* k) {
        constexpr int P = L::PACK;
        powers[h * bt] = narrow_head<L>(k, d, wide, bytes);
        uint8_t* to = bytes_at + h * d * bt + offset * P;
        for (int64_t i = 0; i < d / P; ++i) memcpy(to + i * bt * P, bytes + i * P, P);
    }
    void value(int64_t h, const T* v) {
        constexpr int P = L::PACK;
        powers[(kv_heads + h) * bt] = narrow_head<L>(v, d, wide, bytes);
        uint8_t* to = bytes_at + (kv_heads + h) * d * bt + offset / P * d * P + offset % P;
        for (int64_t i = 0; i < d; ++i) to[i * P] = bytes[i];
    }
};

template <class L, class To>
void rope_row(const RopeCall& c, int64_t row, To to) {
    typedef typename L::T T;
    const T* v = rope_heads<L>(c, row, [&](int64_t h, const T* k) { to.key(h, k); });
    if (c.latent) return;
    for (int64_t h = 0; h < c.kv_heads; ++h) to.value(h, v + h * c.head_dim);
}

// The same without blocks: K and V of row t to kv[t][2 * kv_heads][head_dim], `c.blocks` being kv.
// Of latents it is kv[t][kv_heads][head_dim].
template <class L>
void rope_apart(const RopeCall& c, int64_t row) {
    typedef typename L::T T;
    const int64_t d = c.head_dim, width = c.kv_heads * d;
    T* kv = (T*)c.blocks + row * (c.latent ? 1 : 2) * width;
    const T* v =
        rope_heads<L>(c, row, [&](int64_t h, const T* k) { memcpy(kv + h * d, k, d * sizeof(T)); });
    if (!c.latent) memcpy(kv + width, v, width * sizeof(T));
}

template <class L, class To>
void store_row(const StoreCall& c, int64_t row, To to) {
    const int64_t d = c.head_dim, width = c.kv_heads * d;
    const typename L::T* k = (const typename L::T*)c.kv + row * (c.latent ? 1 : 2) * width;
    for (int64_t h = 0; h < c.kv_heads; ++h, k += d) {
        to.key(h, k);
        if (!c.latent) to.value(h, k + width);
    }
}

bool has_angles(const RopeCall& c) {
    if (c.head_dim > MAX_HEAD_DIM) return false;
    const int64_t rows = c.row_starts[c.sequences];
    for (int64_t row = 0; row < rows; ++row) {
        if (c.positions[row] < 0 || c.positions[row] >= c.max_positions) return false;
    }
    return true;
}

// Whether every row has a block to be written to.
template <class Call>
bool has_blocks(const Call& c) {
    for (int64_t s = 0; s < c.sequences; ++s) {
        for (int64_t row = c.row_starts[s]; row < c.row_starts[s + 1]; ++row) {
            const int64_t index = c.positions[row] / c.block_tokens;
            if (c.positions[row] < 0 || index >= c.table_width) return false;
            const int64_t block = c.block_tables[s * c.table_width + index];
            if (block < 0 || block >= c.num_blocks) return false;
        }
    }
    return true;
}

// Writes nothing and returns 1 if a row stands outside the tables.
template <class L>
int rope_store(const RopeCall& c, int threads) {
    if (!has_angles(c) || !has_blocks(c)) return 1;
    const int64_t rows = c.row_starts[c.sequences];
    const bool many = worth_threads(threads, rows * c.heads * c.head_dim);
#pragma omp parallel num_threads(threads) if (many)
    for (int64_t s = 0; s < c.sequences; ++s) {
#pragma omp for schedule(static) nowait
        for (int64_t row = c.row_starts[s]; row < c.row_starts[s + 1]; ++row)
            if (c.fp8) rope_row<L>(c, row, PlaceFp8<L>(c, row, s));
            else rope_row<L>(c, row, Place<L>(c, row, s));
    }
    return 0;
}

template <class L>
int rope(const RopeCall& c, int threads) {
    if (!has_angles(c)) return 1;
    const int64_t rows = c.row_starts[c.sequences];
    const bool many = worth_threads(threads, rows * c.heads * c.head_dim);
#pragma omp parallel for schedule(static) num_threads(threads) if (many)
    for (int64_t row = 0; row < rows; ++row) rope_apart<L>(c, row);
    return 0;
}

template <class L>
int store_rows(const StoreCall& c, int threads) {
    if (!has_blocks(c) || c.head_dim > MAX_HEAD_DIM) return 1;
    const int64_t rows = c.row_starts[c.sequences];
    const bool many = worth_threads(threads, 2 * rows * c.kv_heads * c.head_dim);
#pragma omp parallel num_threads(threads) if (many)
    for (int64_t s = 0; s < c.sequences; ++s) {
#pragma omp for schedule(static) nowait
        for (int64_t row = c.row_starts[s]; row < c.row_starts[s + 1]; ++row)
            if (c.fp8) store_row<L>(c, row, PlaceFp8<L>(c, row, s));
            else store_row<L>(c, row, Place<L>(c, row, s));
    }
    return 0;
}

}  // namespace
}  // namespace moonpool

using namespace moonpool;

#define MP_ROWWISE(L, type)                                                                        \
    MP_EXPORT(moonpool_rms_norm_##type)(const void* x, const void* weight, void* y, int64_t rows,  \
                                        int64_t width, float eps, int threads) {                   \
        rms_norm<L>(x, weight, y, rows, width, eps, threads);                                      \
        return 0;                                                                                  \
    }                                                                                              \
    MP_EXPORT(moonpool_add_rms_norm_##type)(const void* x, void* residual, const void* weight,     \
                                            void* y, int64_t rows, int64_t width, float eps,       \
                                            int threads) {                                         \
        add_rms_norm<L>(x, residual, weight, y, rows, width, eps, threads);                        \
        return 0;                                                                                  \
    }                                                                                              \
    MP_EXPORT(moonpool_glu_##type)(const void* gate_up, void* y, int64_t rows, int64_t width,      \
                                   int kind, float alpha, float limit, int threads) {              \
        glu<L>(gate_up, y, rows, width, kind, alpha, limit, threads);                              \
        return 0;                                                                                  \
    }                                                                                              \
    MP_EXPORT(moonpool_rope_store_##type)(const RopeCall* call, int threads) {                     \
        return rope_store<L>(*call, threads);                                                      \
    }                                                                                              \
    MP_EXPORT(moonpool_rope_##type)(const RopeCall* call, int threads) {                           \
        return rope<L>(*call, threads);                                                            \
    }                                                                                              \
    MP_EXPORT(moonpool_store_##type)(const StoreCall* call, int threads) {                         \
        return store_rows<L>(*call, threads);                                                      \
    }

MP_EXPORT(moonpool_soft_cap)(const float* x, float* y, int64_t count, float cap, int threads) {
    soft_cap(x, y, count, cap, threads);
    return 0;
}

MP_ROWWISE(F32, f32)
MP_ROWWISE(B16, b16)
