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

}  // namespace
}  // namespace moonpool
