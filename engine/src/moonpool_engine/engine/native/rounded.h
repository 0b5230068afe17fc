// Rows of x as 16-bit whole numbers, one scale per GROUP of them: what integer linears multiply.
#pragma once

#include "panels.h"

namespace moonpool {
namespace {

constexpr int64_t GROUP = 256;
constexpr float LARGEST = 32767.f;
constexpr float LEAST = 1e-30f;  // of a group that counts for anything

// One group of a row as 16-bit numbers; returns its scale, NaN if a number is not finite.
template <class L>
MP_INLINE float narrow(const typename L::T* x, int64_t n, int16_t* to) {
    vf top = zero(), wrong = zero();
    for (int64_t k = 0; k < n; k += W) {
        const vf some = load_first<L>(x + k, (int)least(n - k, W));
        top = max(top, absolute(some));
        wrong = add(wrong, mul(some, zero()));
    }
    const float most = highest(top);
    const vf inverse = set1(most > LEAST ? LARGEST / most : 0.f);
    for (int64_t k = 0; k < n; k += W)
        narrow_i16(to + k, mul(load_first<L>(x + k, (int)least(n - k, W)), inverse));
    return most / LARGEST + sum(wrong);
}

// Four numbers as two lanes: their high bytes, which have the sign, and their low bytes.
MP_INLINE void split_bytes(const int16_t* x, int32_t* high, int32_t* low) {
    uint64_t numbers;
    memcpy(&numbers, x, 8);
    for (int64_t side = 0; side < 2; ++side) {
        uint64_t bytes = (side ? numbers : numbers >> 8) & 0x00ff00ff00ff00ff;
        bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffff;
        bytes |= bytes >> 16;
        memcpy(side ? low : high, &bytes, 4);
    }
}
#if defined(MP_BYTE_DOTS)
// From sums of products with high and with low bytes.
MP_INLINE vi joined(vi high, vi low) { return addi(shift_left(high, 8), low); }
#endif

}  // namespace
}  // namespace moonpool
