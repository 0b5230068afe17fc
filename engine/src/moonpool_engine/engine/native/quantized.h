// Weights of 4 to 8 bits in groups, as they lie in panels: linear_quantized.cpp describes them.
#pragma once

#include "rounded.h"

namespace moonpool {
namespace {

constexpr int BLOCK = 32;                   // of `in`, in one record
constexpr int LANES = BLOCK / 2;            // of a row, in one record
constexpr int64_t WORD = PANEL * 4;         // bytes of one word of all outputs
constexpr int64_t BLOCKS = GROUP / BLOCK;   // in a group

enum Scales { HALF, WIDE, WHOLE };  // float16, float32, or 8-bit times a float16 per group

template <int BITS_, int SUB_, Scales SCALES_, bool MINIMUM_>
struct Form {
    static constexpr int BITS = BITS_, SUBS = BLOCK / SUB_;
    static constexpr Scales SCALES = SCALES_;
    static constexpr bool MINIMUM = MINIMUM_;
    static constexpr int64_t SCALE = SCALES == HALF ? 2 : SCALES == WIDE ? 4 : 1;  // bytes
    static constexpr int64_t NUMBERS = BITS * WORD;
    static constexpr int64_t RECORD = NUMBERS + SUBS * PANEL * SCALE * (MINIMUM ? 2 : 1);
    static constexpr int64_t HEAD = SCALES == WHOLE ? 2 * PANEL * (MINIMUM ? 2 : 1) : 0;
    static int64_t panel_bytes(int64_t blocks) {
        return blocks * RECORD + ceil_div(blocks, BLOCKS) * HEAD;
    }
};

#if defined(MP_BYTE_DOTS)
MP_INLINE void pack_four(const int16_t* x, int32_t* first, int32_t* second) {
    split_bytes(x, first, second);
}

MP_INLINE vi shifted(vi x, int n) { return n < 0 ? shift_right(x, -n) : shift_left(x, n); }

// Numbers 4 * WORD_OF to 4 * WORD_OF + 3 of one vector of outputs, in the bytes of its lanes.
template <int BITS, int WORD_OF>
MP_INLINE vi numbers(const char* words) {
    if (BITS == 8) return loadi(words + WORD_OF * WORD);
    const vi stored = loadi(words + WORD_OF % 4 * WORD);
    const vi low = both(shift_right(stored, 4 * (WORD_OF / 4)), set1i(0x0f0f0f0f));
    if (BITS == 4) return low;
    // Lane 2w of the 16-bit layout has numbers 4w and 4w + 2, lane 2w + 1 the others.
    const int each = BITS - 4, at = BITS == 5 ? 2 * WORD_OF : 4 * (WORD_OF % 4);
    const vi more = loadi(words + (BITS == 5 ? 4 : 4 + WORD_OF / 4) * WORD);
    const int mask = BITS == 5 ? 0x00100010 : 0x00300030;
    const vi even = both(shifted(more, 4 - at), set1i(mask));
    const vi odd = both(shifted(more, 12 - at - each), set1i(mask << 8));
    return either(low, either(even, odd));
}

template <int BITS, int WORD_OF, int LAST, int ROWS>
MP_INLINE void add_words(vi (&high)[ROWS], vi (&low)[ROWS], const int32_t* a, const char* words) {
    const vi weights = numbers<BITS, WORD_OF>(words);
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; ++r) {
        high[r] = dot_u8_i8(high[r], weights, splat(a + 2 * WORD_OF * ROWS + r));
        low[r] = dot_u8_u8(low[r], weights, splat(a + (2 * WORD_OF + 1) * ROWS + r));
    }
    if constexpr (WORD_OF + 1 < LAST)
        add_words<BITS, WORD_OF + 1, LAST, ROWS>(high, low, a, words);
}

// Whole sums of lanes [FIRST, LAST) of one record, on top of `from`: 2 vectors of outputs per row.
template <int BITS, int FIRST, int LAST, int ROWS>
__attribute__((noinline)) void record_sums(vi (&out)[ROWS][2], const int32_t* from,
                                           const int32_t* a, const char* words) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
        vi high[ROWS], low[ROWS];
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; ++r) high[r] = zeroi(), low[r] = splat(from + r);
        add_words<BITS, FIRST / 2, LAST / 2, ROWS>(high, low, a, words + v * W * 4);
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; ++r) out[r][v] = joined(high[r], low[r]);
    }
}
#else
MP_INLINE void pack_four(const int16_t* x, int32_t* first, int32_t* second) {
    const int16_t even[2] = {x[0], x[2]}, odd[2] = {x[1], x[3]};
    memcpy(first, even, 4);
    memcpy(second, odd, 4);
}

// The numbers that lane LANE of a row meets, of one vector of outputs.
template <int BITS, int LANE>
MP_INLINE vi numbers(const char* words) {
    if (BITS == 8)
        return both(shift_right(loadi(words + LANE / 2 * WORD), 8 * (LANE % 2)), set1i(0x00ff00ff));
    const int word = LANE % 8 / 2, shift = 8 * (LANE % 2) + 4 * (LANE / 8);
    const vi low = both(shift_right(loadi(words + word * WORD), shift), set1i(0x000f000f));
    if (BITS == 5) {
        const vi more = loadi(words + 4 * WORD);
        const vi high = LANE < 4 ? shift_left(more, 4 - LANE % 4) : shift_right(more, LANE - 4);
        return either(low, both(high, set1i(0x00100010)));
    }
    if (BITS == 6) {
        const vi more = loadi(words + (4 + LANE / 8) * WORD);
        const int at = 2 * (LANE % 8);
        const vi high = at < 4 ? shift_left(more, 4 - at % 4) : shift_right(more, at - 4);
        return either(low, both(high, set1i(0x00300030)));
    }
    return low;
}

template <int BITS, int LANE, int LAST, int ROWS>
MP_INLINE void add_lanes(vi (&sums)[ROWS][2], const int32_t* a, const char* words) {
    const vi first = numbers<BITS, LANE>(words), second = numbers<BITS, LANE>(words + W * 4);
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; ++r) {
        const vi lane = splat(a + LANE * ROWS + r);
        sums[r][0] = dot_i16(sums[r][0], lane, first);
        sums[r][1] = dot_i16(sums[r][1], lane, second);
    }
    if constexpr (LANE + 1 < LAST) add_lanes<BITS, LANE + 1, LAST, ROWS>(sums, a, words);
}

// Whole sums of lanes [FIRST, LAST) of one record, on top of `from`: 2 vectors of outputs per row.
// Not inlined: the compiler keeps the sums in registers only where nothing else lives.
template <int BITS, int FIRST, int LAST, int ROWS>
__attribute__((noinline)) void record_sums(vi (&out)[ROWS][2], const int32_t* from,
                                           const int32_t* a, const char* words) {
    vi sums[ROWS][2];
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = splat(from + r);
    add_lanes<BITS, FIRST, LAST, ROWS>(sums, a, words);
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; ++r) {
        out[r][0] = sums[r][0];
        out[r][1] = sums[r][1];
    }
}
#endif

// A packed tile of rows.
struct Tile {
    const int32_t* lanes;   // [blocks][LANES][rows]
    const int32_t* sums;    // [blocks][2][rows]: of 16 numbers each
    const float* scales;    // [groups][rows]
    int64_t blocks;
    int32_t offset;
};

// The scales, or the minimums, of VECS vectors of outputs.
template <Scales SCALES, int VECS>
MP_INLINE void read_scales(vf (&to)[VECS], const char* at, const vf (&group)[VECS]) {
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) {
        const int64_t lane = v * W;
        if (SCALES == HALF) to[v] = load_f16(at + 2 * lane);
        if (SCALES == WIDE) to[v] = load((const float*)at + lane);
        if (SCALES == WHOLE) to[v] = mul(group[v], load_i8(at + lane));
    }
}

}  // namespace
}  // namespace moonpool
