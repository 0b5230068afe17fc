// The one loop over rows and panels that all linears share.
//
// A weight is packed once into panels of 32 outputs, so a single row reads it as one stream. Rows
// of x are packed into register tiles, a chunk of them at a time. What a panel holds, how rows are
// packed and what a tile does is the call's:
//
//     rows, out                      of y
//     tile_lanes()                   32-bit lanes that one row takes in a packed tile
//     panel_bytes()                  of the weight
//     panels()                       where the first one lies
//     ahead_step()                   bytes of a panel that a tile passes per lane of in, per half
//     pack_rows(first, n, packed)    rows [first, first + n) of x as one tile
//     tile(n, packed, row, panel, ahead, ahead_step)
#pragma once

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

// The last panel may be wider than y.
template <class L, int ROWS>
__attribute__((noinline)) void store_edge(typename L::T* y, int64_t out, vf (&sums)[ROWS][2],
                                          int64_t row, int64_t column) {
    for (int r = 0; r < ROWS; ++r) {
        for (int64_t v = 0; v < 2; ++v) {
            const int64_t at = column + v * W, n = least(out - at, W);
            if (n > 0) store_first<L>(y + (row + r) * out + at, sums[r][v], (int)n);
        }
    }
}

// Adds the bias, if there is one, and puts the sums of 2 vectors from `column` on into y.
template <class L, int ROWS>
MP_INLINE void finish(typename L::T* y, int64_t out, const float* bias, vf (&sums)[ROWS][2],
                      int64_t row, int64_t column) {
    if (bias) {
        const vf first = load(bias + column), second = load(bias + column + W);
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; ++r) {
            sums[r][0] = add(sums[r][0], first);
            sums[r][1] = add(sums[r][1], second);
        }
    }
    if (column + 2 * W > out) return store_edge<L, ROWS>(y, out, sums, row, column);
    typename L::T* to = y + row * out + column;
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; ++r) {
        L::store(to + r * out, sums[r][0]);
        L::store(to + r * out + W, sums[r][1]);
    }
}

// One chunk of rows against all panels. A panel stays in the cache while the tiles pass over it;
// the first tile fetches what comes next: a little ahead of itself if it is the only one, else
// the next panel.
template <class Call>
void chunk(const Call& c, int64_t first, int64_t rows, int32_t* packed, int threads) {
    const int64_t tiles = ceil_div(rows, MAX_ROWS), panels = ceil_div(c.out, PANEL);
    const int64_t size = rows / tiles, larger = rows % tiles;
    const int64_t panel_bytes = c.panel_bytes(), lanes = c.tile_lanes();
    auto start = [&](int64_t i) { return i * size + least(i, larger); };
    auto length = [&](int64_t i) { return (int)(size + (i < larger)); };
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tiles; ++i)
            c.pack_rows(first + start(i), length(i), packed + start(i) * lanes);
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; ++p) {
            const char* here = c.panels() + p * panel_bytes;
            for (int64_t i = 0; i < tiles; ++i) {
                const int32_t* a = packed + start(i) * lanes;
                const int64_t alone = length(i) <= NEAR_ROWS ? NEAR_BYTES : FAR_BYTES;
                const char* ahead = here + (tiles == 1 ? alone : panel_bytes);
                const int64_t step = i == 0 ? c.ahead_step() : 0;
                c.tile(length(i), a, first + start(i), p, ahead, step);
            }
        }
    }
}

// All rows. The whole of `in` is one chain of sums per output: nothing is split over it.
template <class Call>
void run(const Call& c, int threads) {
    static thread_local Scratch scratch;
    const int64_t most = least(c.rows, CHUNK_ROWS), chunks = ceil_div(c.rows, CHUNK_ROWS);
    int32_t* packed = (int32_t*)scratch.take(most * c.tile_lanes() * 4 + 64);
    if (c.rows * c.in * c.out < PARALLEL_PRODUCTS) threads = 1;
    for (int64_t i = 0; i < chunks; ++i) {
        const int64_t first = c.rows * i / chunks;
        chunk(c, first, c.rows * (i + 1) / chunks - first, packed, threads);
    }
}

}  // namespace
}  // namespace moonpool
