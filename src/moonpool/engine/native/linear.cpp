// y = x @ weight.T + bias, for any number of rows, each row's bits the same in all of them.
//
// The weight is packed once into panels of 32 outputs: [out / 32][lanes of in][32], so a single row
// reads it as one stream. Rows of x are packed here into register tiles [lanes][rows of the tile].
// The whole of `in` is one chain of sums per output: nothing is split over it, at any size.
#include "simd.h"

namespace moonpool {
namespace {

constexpr int PANEL = 32;
constexpr int HALVES = PANEL / (2 * W);
constexpr int64_t PARALLEL_PRODUCTS = 1 << 18;  // fewer do not pay for a second thread
constexpr int64_t CHUNK_ROWS = 32 * MAX_ROWS;  // rows packed at a time

// How far ahead of itself a lone tile fetches weights: measured on Zen 4, where a few rows stream
// best close ahead, and tiles that compute for longer on each line want far more lines under way.
constexpr int64_t NEAR_BYTES = 1024, FAR_BYTES = 12288;
constexpr int NEAR_ROWS = 4;

template <class L>
struct LinearCall {
    typedef typename L::T T;
    const T* x;
    const int32_t* weight;
    const float* bias;  // padded to whole panels, or null
    T* y;
    int64_t rows, in, out, lanes;
};

// Rows [first, first + n) of x as [lanes][n] lanes, 16 lanes of a row at a time (one cache line).
template <class L>
void pack_rows(const LinearCall<L>& c, int64_t first, int n, int32_t* packed) {
    const int64_t whole = c.in / L::PACK;
    for (int64_t k0 = 0; k0 < whole; k0 += 16) {
        const int64_t k1 = least(k0 + 16, whole);
        for (int r = 0; r < n; ++r) {
            const char* row = (const char*)(c.x + (first + r) * c.in);
            for (int64_t k = k0; k < k1; ++k) memcpy(&packed[k * n + r], row + 4 * k, 4);
        }
    }
    if (whole < c.lanes) {  // an odd `in`: the last lane is half empty
        for (int r = 0; r < n; ++r) {
            int32_t lane = 0;
            memcpy(&lane, c.x + (first + r) * c.in + c.in - 1, sizeof(typename L::T));
            packed[whole * n + r] = lane;
        }
    }
}

// The last panel may be wider than y.
template <class L, int ROWS>
__attribute__((noinline)) void store_edge(const LinearCall<L>& c, vf (&sums)[ROWS][2], int64_t row,
                                          int64_t column) {
    for (int r = 0; r < ROWS; ++r) {
        for (int64_t v = 0; v < 2; ++v) {
            const int64_t at = column + v * W, n = least(c.out - at, W);
            if (n > 0) store_first<L>(c.y + (row + r) * c.out + at, sums[r][v], (int)n);
        }
    }
}

template <class L, int ROWS>
void tile(const LinearCall<L>& c, const int32_t* a, int64_t row, int64_t panel, const char* ahead,
          int64_t ahead_step) {
    const int32_t* b = c.weight + panel * PANEL * c.lanes;
    for (int h = 0; h < HALVES; ++h) {
        const int64_t column = panel * PANEL + h * 2 * W;
        vf sums[ROWS][2];
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = zero();
        accumulate<L, ROWS, 2, 1, ROWS, 2>(sums, a, b + h * 2 * W, PANEL, c.lanes, ahead,
                                           ahead_step);
        if (c.bias) {
            const vf first = load(c.bias + column), second = load(c.bias + column + W);
#pragma GCC unroll 14
            for (int r = 0; r < ROWS; ++r) {
                sums[r][0] = add(sums[r][0], first);
                sums[r][1] = add(sums[r][1], second);
            }
        }
        if (column + 2 * W > c.out) {
            store_edge<L, ROWS>(c, sums, row, column);
            continue;
        }
        typename L::T* to = c.y + row * c.out + column;
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; ++r) {
            L::store(to + r * c.out, sums[r][0]);
            L::store(to + r * c.out + W, sums[r][1]);
        }
    }
}

template <class L>
using TileFn = void (*)(const LinearCall<L>&, const int32_t*, int64_t, int64_t, const char*,
                        int64_t);

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

// One chunk of rows against all panels. A panel stays in the cache while the tiles pass over it;
// the first tile fetches what comes next: a little ahead of itself if it is the only one, else
// the next panel.
template <class L>
void chunk(const LinearCall<L>& c, int64_t first, int64_t rows, int32_t* packed, int threads) {
    const int64_t tiles = ceil_div(rows, MAX_ROWS), panels = ceil_div(c.out, PANEL);
    const int64_t size = rows / tiles, larger = rows % tiles;
    const int64_t panel_bytes = c.lanes * PANEL * 4;
    auto start = [&](int64_t i) { return i * size + least(i, larger); };
    auto length = [&](int64_t i) { return (int)(size + (i < larger)); };
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tiles; ++i)
            pack_rows(c, first + start(i), length(i), packed + start(i) * c.lanes);
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; ++p) {
            const char* here = (const char*)c.weight + p * panel_bytes;
            for (int64_t i = 0; i < tiles; ++i) {
                const int32_t* a = packed + start(i) * c.lanes;
                const int64_t alone = length(i) <= NEAR_ROWS ? NEAR_BYTES : FAR_BYTES;
                const char* ahead = here + (tiles == 1 ? alone : panel_bytes);
                const int64_t step = i == 0 ? PANEL * 4 / HALVES : 0;
                tile_for<L>(length(i))(c, a, first + start(i), p, ahead, step);
            }
        }
    }
}

template <class L>
void linear(const void* x, const void* weight, const float* bias, void* y, int64_t rows,
            int64_t in, int64_t out, int threads) {
    static thread_local Scratch scratch;
    typedef typename L::T T;
    const int64_t lanes = ceil_div(in, L::PACK);
    const LinearCall<L> c{(const T*)x, (const int32_t*)weight, bias, (T*)y, rows, in, out, lanes};
    const int64_t most = least(rows, CHUNK_ROWS);
    int32_t* packed = (int32_t*)scratch.take(most * lanes * 4 + 64);
    const int64_t chunks = ceil_div(rows, CHUNK_ROWS);
    if (rows * in * out < PARALLEL_PRODUCTS) threads = 1;
    for (int64_t i = 0; i < chunks; ++i) {
        const int64_t first = rows * i / chunks;
        chunk(c, first, rows * (i + 1) / chunks - first, packed, threads);
    }
}

}  // namespace
}  // namespace moonpool

MP_EXPORT(moonpool_linear_f32)(const void* x, const void* weight, const float* bias, void* y,
                               int64_t rows, int64_t in, int64_t out, int threads) {
    moonpool::linear<moonpool::F32>(x, weight, bias, y, rows, in, out, threads);
    return 0;
}

MP_EXPORT(moonpool_linear_b16)(const void* x, const void* weight, const float* bias, void* y,
                               int64_t rows, int64_t in, int64_t out, int threads) {
    moonpool::linear<moonpool::B16>(x, weight, bias, y, rows, in, out, threads);
    return 0;
}
