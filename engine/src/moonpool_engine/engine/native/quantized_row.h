// One row against weights of 4 to 8 bits: what a decode alone does, for instruction sets that define
// MP_ROW_TILES.
//
// A tile of several rows takes a panel in halves, since its sums need the registers. For one row that
// costs more than it saves: here the whole panel is one pass, in the order in which it lies, and each
// lane of the row is read once for all outputs. Sums within a sub-group are whole numbers, so their
// order is free; all else is computed in the order of linear_quantized.cpp, and the bits are the same.
#pragma once

#include "quantized.h"

#if defined(MP_ROW_TILES)

namespace moonpool {
namespace {

constexpr int ROW_VECS = PANEL / W;

// Weights of 4 bits times the high and the low bytes of x. Sums of either stay in 16 bits: the first
// within 8 * 2 * 15 * 128, the second within 8 * 2 * 15 * 255 if it begins at -2^15. Two vectors at a
// time: their sums and what they meet fit the registers.
MP_INLINE void nibble_sums(vi (&out)[ROW_VECS], int32_t from, const int32_t* a, const char* words) {
    const vi mask = set1i(0x0f0f0f0f);
#pragma GCC unroll 1
    for (int pair = 0; pair < ROW_VECS; pair += 2) {
        __asm__("" : "+r"(a));  // else the compiler would keep the lanes of both pairs
        vi high[2] = {zeroi(), zeroi()};
        vi low[2] = {set1i((int)0x80008000), set1i((int)0x80008000)};
#pragma GCC unroll 4
        for (int w = 0; w < 4; ++w) {
            const vi high_of_low = splat(a + 2 * w), low_of_low = splat(a + 2 * w + 1);
            const vi high_of_high = splat(a + 8 + 2 * w), low_of_high = splat(a + 9 + 2 * w);
#pragma GCC unroll 2
            for (int v = 0; v < 2; ++v) {
                const vi stored = loadi(words + w * WORD + (pair + v) * W * 4);
                const vi first = both(stored, mask), second = both(shift_right(stored, 4), mask);
                high[v] = add_i16(high[v], pairs_u8_i8(first, high_of_low));
                low[v] = add_i16(low[v], pairs_u8_i8(low_of_low, first));
                high[v] = add_i16(high[v], pairs_u8_i8(second, high_of_high));
                low[v] = add_i16(low[v], pairs_u8_i8(low_of_high, second));
            }
        }
        const vi start = set1i(from + 2 * 32768), one = set1i(0x00010001), much = set1i(0x01000100);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v)
            out[pair + v] = dot_i16(dot_i16(start, high[v], much), low[v], one);
    }
}

MP_INLINE void byte_sums(vi (&out)[ROW_VECS], int32_t from, const int32_t* a, const char* words) {
    const vi mask = set1i(0x00ff00ff);
#pragma GCC unroll 4
    for (int v = 0; v < ROW_VECS; ++v) out[v] = set1i(from);
#pragma GCC unroll 8
    for (int w = 0; w < 8; ++w) {
        const vi even = splat(a + 2 * w), odd = splat(a + 2 * w + 1);
#pragma GCC unroll 4
        for (int v = 0; v < ROW_VECS; ++v) {
            const vi stored = loadi(words + w * WORD + v * W * 4);
            out[v] = dot_i16(out[v], even, both(stored, mask));
            out[v] = dot_i16(out[v], odd, odd_bytes(stored));
        }
    }
}

template <int BITS, int LANE, int LAST>
MP_INLINE void lane_sums(vi (&out)[ROW_VECS], const int32_t* a, const char* words) {
    const vi lane = splat(a + LANE);
#pragma GCC unroll 4
    for (int v = 0; v < ROW_VECS; ++v)
        out[v] = dot_i16(out[v], lane, numbers<BITS, LANE>(words + v * W * 4));
    if constexpr (LANE + 1 < LAST) lane_sums<BITS, LANE + 1, LAST>(out, a, words);
}

template <int BITS, int FIRST, int LAST>
MP_INLINE void row_sums(vi (&out)[ROW_VECS], int32_t from, const int32_t* a, const char* words) {
    if constexpr (BITS == 4) return nibble_sums(out, from, a, words);
    if constexpr (BITS == 8) return byte_sums(out, from, a, words);
#pragma GCC unroll 4
    for (int v = 0; v < ROW_VECS; ++v) out[v] = set1i(from);
    lane_sums<BITS, FIRST, LAST>(out, a, words);
}

template <class F, int SUB>
MP_INLINE void add_row_record(vf (&group)[ROW_VECS], const Tile& t, int64_t block,
                              const char* record, const vf (&scale_of)[ROW_VECS],
                              const vf (&minimum_of)[ROW_VECS]) {
    const int32_t *a = t.lanes + block * LANES, *halves = t.sums + block * 2;
    const int32_t x = F::SUBS == 2 ? halves[SUB] : halves[0] + halves[1];
    vi whole[ROW_VECS];
    row_sums<F::BITS, SUB * LANES / F::SUBS, (SUB + 1) * LANES / F::SUBS>(whole, -t.offset * x, a,
                                                                       record);
    const char* scales = record + F::NUMBERS + SUB * PANEL * F::SCALE;
    const char* minimums = scales + F::SUBS * PANEL * F::SCALE;
    vf scale[ROW_VECS], minimum[ROW_VECS];
    read_scales<F::SCALES, ROW_VECS>(scale, scales, scale_of);
    if (F::MINIMUM) read_scales<F::SCALES, ROW_VECS>(minimum, minimums, minimum_of);
#pragma GCC unroll 4
    for (int v = 0; v < ROW_VECS; ++v) {
        group[v] = add(group[v], mul(to_float(whole[v]), scale[v]));
        if (F::MINIMUM) group[v] = add(group[v], mul(set1((float)x), minimum[v]));
    }
}

// All outputs of a panel for a row alone: to [PANEL].
template <class F>
void row_tile(const Tile& t, const char* panel, float* to, const char* ahead, bool fetches) {
    vf sums[ROW_VECS], scale_of[ROW_VECS] = {}, minimum_of[ROW_VECS] = {};
#pragma GCC unroll 4
    for (int v = 0; v < ROW_VECS; ++v) sums[v] = zero();
    for (int64_t first = 0; first < t.blocks; first += BLOCKS) {
        vf group[ROW_VECS];
#pragma GCC unroll 4
        for (int v = 0; v < ROW_VECS; ++v) {
            group[v] = zero();
            if (F::SCALES != WHOLE) continue;
            scale_of[v] = load_f16(panel + 2 * v * W);
            if (F::MINIMUM) minimum_of[v] = load_f16(panel + 2 * (PANEL + v * W));
        }
        panel += F::HEAD;
        const int64_t last = least(first + BLOCKS, t.blocks);
        for (int64_t block = first; block < last; ++block) {
            if (fetches) {
                for (int64_t at = 0; at < F::RECORD; at += 64) fetch(ahead + at);
                ahead += F::RECORD;
            }
            add_row_record<F, 0>(group, t, block, panel, scale_of, minimum_of);
            if constexpr (F::SUBS == 2)
                add_row_record<F, 1>(group, t, block, panel, scale_of, minimum_of);
            panel += F::RECORD;
        }
        const vf scale = set1(t.scales[first / BLOCKS]);
#pragma GCC unroll 4
        for (int v = 0; v < ROW_VECS; ++v) sums[v] = add(sums[v], mul(group[v], scale));
    }
#pragma GCC unroll 4
    for (int v = 0; v < ROW_VECS; ++v) store(to + v * W, sums[v]);
}

}  // namespace
}  // namespace moonpool

#endif
