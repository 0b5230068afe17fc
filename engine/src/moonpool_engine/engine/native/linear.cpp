// y = x @ weight.T + bias, for any number of rows, each row's bits the same in all of them.
//
// Panels of the weight are [lanes of in][32]; rows of x are packed into register tiles
// [lanes][rows of the tile]. The whole of `in` is one chain of sums per output: nothing is split
// over it, at any size.
#include "panels.h"

namespace moonpool {
namespace {

// Rows for which 4 sums each, and the lanes of b and a, fit the 16 registers of AVX2.
constexpr int WHOLE_PANEL_ROWS = 2;

template <class L>
struct LinearCall;

template <class L, int ROWS>
void tile(const LinearCall<L>& c, const int32_t* a, int64_t row, int64_t panel, const char* ahead,
          int64_t ahead_step) {
    const int32_t* b = c.weight + panel * PANEL * c.lanes;
    // A few rows leave registers for the whole panel: one pass reads it in order, and the chains of
    // twice as many sums hide the latency of each other's products.
    if constexpr (HALVES == 2 && ROWS <= WHOLE_PANEL_ROWS) {
        vf sums[ROWS][4];
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; ++r)
            sums[r][0] = sums[r][1] = sums[r][2] = sums[r][3] = zero();
        accumulate<L, ROWS, 4, 1, ROWS, 2>(sums, a, b, PANEL, c.lanes, ahead, 2 * ahead_step);
        for (int h = 0; h < 2; ++h) {
            vf half[ROWS][2];
#pragma GCC unroll 14
            for (int r = 0; r < ROWS; ++r) {
                half[r][0] = sums[r][2 * h];
                half[r][1] = sums[r][2 * h + 1];
            }
            finish<L, ROWS>(c.y, c.out, c.bias, half, row, panel * PANEL + h * 2 * W);
        }
        return;
    }
    for (int h = 0; h < HALVES; ++h) {
        vf sums[ROWS][2];
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = zero();
        accumulate<L, ROWS, 2, 1, ROWS, 2>(sums, a, b + h * 2 * W, PANEL, c.lanes, ahead,
                                           ahead_step);
        finish<L, ROWS>(c.y, c.out, c.bias, sums, row, panel * PANEL + h * 2 * W);
    }
}

template <class L>
using TileFn = void (*)(const LinearCall<L>&, const int32_t*, int64_t, int64_t, const char*,
                        int64_t);

template <class L, int ROWS = MAX_ROWS>
TileFn<L> tile_for(int rows) {
    if constexpr (ROWS == 0)
        __builtin_trap();
    else
        return rows == ROWS ? tile<L, ROWS> : tile_for<L, ROWS - 1>(rows);
}

template <class L>
struct LinearCall {
    typedef typename L::T T;
    const T* x;
    const int32_t* weight;
    const float* bias;  // padded to whole panels, or null
    T* y;
    int64_t rows, in, out, lanes;

    int64_t tile_lanes() const { return lanes; }
    int64_t panel_bytes() const { return lanes * PANEL * 4; }
    int64_t ahead_step() const { return PANEL * 4 / HALVES; }
    const char* panels() const { return (const char*)weight; }

    // 16 lanes of a row at a time (one cache line).
    void pack_rows(int64_t first, int n, int32_t* packed) const {
        const int64_t whole = in / L::PACK;
        for (int64_t k0 = 0; k0 < whole; k0 += 16) {
            const int64_t k1 = least(k0 + 16, whole);
            for (int r = 0; r < n; ++r) {
                const char* row = (const char*)(x + (first + r) * in);
                for (int64_t k = k0; k < k1; ++k) memcpy(&packed[k * n + r], row + 4 * k, 4);
            }
        }
        if (whole < lanes) {  // an odd `in`: the last lane is half empty
            for (int r = 0; r < n; ++r) {
                int32_t lane = 0;
                memcpy(&lane, x + (first + r) * in + in - 1, sizeof(T));
                packed[whole * n + r] = lane;
            }
        }
    }

    void tile(int n, const int32_t* a, int64_t row, int64_t panel, const char* ahead,
              int64_t ahead_step) const {
        tile_for<L>(n)(*this, a, row, panel, ahead, ahead_step);
    }
};

template <class L>
void linear(const void* x, const void* weight, const float* bias, void* y, int64_t rows,
            int64_t in, int64_t out, int threads) {
    typedef typename L::T T;
    const int64_t lanes = ceil_div(in, L::PACK);
    run(LinearCall<L>{(const T*)x, (const int32_t*)weight, bias, (T*)y, rows, in, out, lanes},
        threads);
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
