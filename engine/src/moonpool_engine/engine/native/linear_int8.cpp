// y = x @ (weight * scales).T + bias with weights of 8 bits, each row's bits its own.
//
// `in` is cut into groups of GROUP. Of each group an output has 8-bit weights and one scale, and a
// row of x is given 16 bits and one scale, of its own. Sums within a group are whole numbers, so
// exact in any order; over the groups they are one chain of multiplications and additions in rising
// order. Hence every instruction set, tile and thread count gives the same bits.
//
// A panel is [lanes of in][32][2] weights, a lane being two neighbours of `in`; the scales of all
// panels are [panel][groups][32]. A packed tile is [lanes][rows], then [groups][rows] scales.
#include "rounded.h"

namespace moonpool {
namespace {

constexpr int64_t GROUP_LANES = GROUP / 2;
static_assert(GROUP * 32767 * 127 < (1ll << 31), "sums of a group fit 32 bits");

template <class L>
struct Int8Call;

#if defined(MP_BYTE_DOTS)
MP_INLINE void pack_lanes(const int16_t* x, int64_t lanes, int64_t step, int32_t* to) {
    int64_t k = 0;
    for (; k + 2 <= lanes; k += 2) split_bytes(x + 2 * k, to + k * step, to + (k + 1) * step);
    if (k < lanes) memcpy(to + k * step, x + 2 * k, 4);
}

// Whole sums of one group: 2 vectors of outputs for each row. Two lanes at a time are four weights
// of an output; a last one alone is multiplied as 16 bits.
template <int ROWS>
__attribute__((noinline)) void group_sums(vi (&out)[ROWS][2], const int32_t* a, const int8_t* b,
                                          int64_t lanes, const char* ahead, int64_t ahead_step) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v, b += 2 * W) {
        vi high[ROWS], low[ROWS];
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; ++r) high[r] = low[r] = zeroi();
        int64_t k = 0;
        for (; k + 2 <= lanes; k += 2) {
            const vi weights = zip_pairs(b + k * 2 * PANEL, b + (k + 1) * 2 * PANEL);
            if (v == 0) fetch(ahead), fetch(ahead + ahead_step), ahead += 2 * ahead_step;
#pragma GCC unroll 14
            for (int r = 0; r < ROWS; ++r) {
                high[r] = dot_i8_i8(high[r], weights, splat(a + k * ROWS + r));
                low[r] = dot_u8_i8(low[r], splat(a + (k + 1) * ROWS + r), weights);
            }
        }
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; ++r) {
            out[r][v] = joined(high[r], low[r]);
            if (k < lanes)
                out[r][v] = dot_i16(out[r][v], splat(a + k * ROWS + r), widen_i8(b + k * 2 * PANEL));
        }
    }
}
#else
MP_INLINE void pack_lanes(const int16_t* x, int64_t lanes, int64_t step, int32_t* to) {
    for (int64_t k = 0; k < lanes; ++k) memcpy(to + k * step, x + 2 * k, 4);
}

// Whole sums of one group: 2 vectors of outputs for each row. Not inlined, since the compiler keeps
// the sums in registers only where nothing else lives.
template <int ROWS>
__attribute__((noinline)) void group_sums(vi (&out)[ROWS][2], const int32_t* a, const int8_t* b,
                                          int64_t lanes, const char* ahead, int64_t ahead_step) {
    vi sums[ROWS][2];
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = zeroi();
    for (int64_t k = 0; k < lanes; ++k) {
        const vi first = widen_i8(b), second = widen_i8(b + 2 * W);
        fetch(ahead);
        ahead += ahead_step;
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; ++r) {
            const vi lane = splat(a + r);
            sums[r][0] = dot_i16(sums[r][0], lane, first);
            sums[r][1] = dot_i16(sums[r][1], lane, second);
        }
        a += ROWS;
        b += 2 * PANEL;
    }
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; ++r) {
        out[r][0] = sums[r][0];
        out[r][1] = sums[r][1];
    }
}
#endif

template <class L, int ROWS>
void tile(const Int8Call<L>& c, const int32_t* a, int64_t row, int64_t panel, const char* ahead,
          int64_t ahead_step) {
    const float* row_scales = (const float*)(a + c.lanes * ROWS);
    for (int h = 0; h < HALVES; ++h) {
        const int8_t* b = c.weight + panel * c.panel_bytes() + h * 4 * W;
        const float* scales = c.scales + panel * c.groups * PANEL + h * 2 * W;
        vf sums[ROWS][2];
        for (int r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = zero();
        for (int64_t g = 0; g < c.groups; ++g) {
            const int64_t from = g * GROUP_LANES, lanes = least(GROUP_LANES, c.lanes - from);
            vi whole[ROWS][2];
            group_sums<ROWS>(whole, a + from * ROWS, b + from * 2 * PANEL, lanes, ahead,
                             ahead_step);
            ahead += lanes * ahead_step;
            const vf first = load(scales + g * PANEL), second = load(scales + g * PANEL + W);
            for (int r = 0; r < ROWS; ++r) {
                const vf scale = set1(row_scales[g * ROWS + r]);
                sums[r][0] = add(sums[r][0], mul(to_float(whole[r][0]), mul(scale, first)));
                sums[r][1] = add(sums[r][1], mul(to_float(whole[r][1]), mul(scale, second)));
            }
        }
        finish<L, ROWS>(c.y, c.out, c.bias, sums, row, panel * PANEL + h * 2 * W);
    }
}

template <class L>
using TileFn = void (*)(const Int8Call<L>&, const int32_t*, int64_t, int64_t, const char*,
                        int64_t);

template <class L, int ROWS = MAX_ROWS>
TileFn<L> tile_for(int rows) {
    if constexpr (ROWS == 0)
        __builtin_trap();
    else
        return rows == ROWS ? tile<L, ROWS> : tile_for<L, ROWS - 1>(rows);
}

template <class L>
struct Int8Call {
    typedef typename L::T T;
    const T* x;
    const int8_t* weight;
    const float* scales;
    const float* bias;  // padded to whole panels, or null
    T* y;
    int64_t rows, in, out, lanes, groups;

    int64_t tile_lanes() const { return lanes + groups; }
    int64_t panel_bytes() const { return lanes * PANEL * 2; }
    int64_t ahead_step() const { return PANEL * 2 / HALVES; }
    const char* panels() const { return (const char*)weight; }

    void pack_rows(int64_t first, int n, int32_t* packed) const {
        alignas(64) int16_t group[GROUP + W] = {};
        float* row_scales = (float*)(packed + lanes * n);
        for (int r = 0; r < n; ++r) {
            for (int64_t g = 0; g < groups; ++g) {
                const int64_t from = g * GROUP, count = least(GROUP, in - from);
                row_scales[g * n + r] = narrow<L>(x + (first + r) * in + from, count, group);
                int32_t* to = packed + from / 2 * n + r;
                pack_lanes(group, (count + 1) / 2, n, to);
            }
        }
    }

    void tile(int n, const int32_t* a, int64_t row, int64_t panel, const char* ahead,
              int64_t ahead_step) const {
        tile_for<L>(n)(*this, a, row, panel, ahead, ahead_step);
    }
};

template <class L>
void linear(const void* x, const void* weight, const float* scales, const float* bias, void* y,
            int64_t rows, int64_t in, int64_t out, int threads) {
    typedef typename L::T T;
    run(Int8Call<L>{(const T*)x, (const int8_t*)weight, scales, bias, (T*)y, rows, in, out,
                    ceil_div(in, 2), ceil_div(in, GROUP)},
        threads);
}

}  // namespace
}  // namespace moonpool

MP_EXPORT(moonpool_linear_int8_f32)(const void* x, const void* weight, const float* scales,
                                    const float* bias, void* y, int64_t rows, int64_t in,
                                    int64_t out, int threads) {
    moonpool::linear<moonpool::F32>(x, weight, scales, bias, y, rows, in, out, threads);
    return 0;
}

MP_EXPORT(moonpool_linear_int8_b16)(const void* x, const void* weight, const float* scales,
                                    const float* bias, void* y, int64_t rows, int64_t in,
                                    int64_t out, int threads) {
    moonpool::linear<moonpool::B16>(x, weight, scales, bias, y, rows, in, out, threads);
    return 0;
}
