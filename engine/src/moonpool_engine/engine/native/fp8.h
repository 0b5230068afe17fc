// K and V in 8 bits: e4m3 with one power of two for each token and head, of K and of V.
//
// A slice holds the elements in the order that they have in the model's type, one byte each, then
// the exponents, biased by 127: [K, V][kv_heads][block_tokens]. The power brings the largest element
// of a token's head to at most 448, the largest e4m3: no element is cut off, and scaling is exact.
#pragma once
#include "simd.h"

namespace moonpool {
namespace {

constexpr float MOST_E4M3 = 448.f;
constexpr float WIDENED = 256.f;  // times what widen_e4m3 gives is the value

MP_INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
MP_INLINE float power_of(uint32_t biased) {
    const uint32_t bits = biased << 23;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// The nearest e4m3, ties to even, of |x| <= 448.
MP_INLINE uint8_t narrow_e4m3(float x) {
    const uint32_t bits = bits_of(x), size = bits & 0x7fffffff;
    const uint32_t small = (uint32_t)(int32_t)nearbyintf(fabsf(x) * 512.f);  // below 2^-6
    const uint32_t normal = ((size + 0x7ffff + ((size >> 20) & 1)) >> 20) - (120u << 3);
    const uint32_t code = size < 0x3c800000 ? small : normal > 0x7e ? 0x7eu : normal;
    return (uint8_t)(code | (bits >> 24 & 0x80));
}

// d elements to bytes; returns the biased exponent of their power of two.
template <class L>
MP_INLINE uint8_t narrow_head(const typename L::T* x, int64_t d, float* wide, uint8_t* to) {
    vf tops = zero();
    for (int64_t i = 0; i < d; i += W) {
        const vf v = L::load(x + i);
        store(wide + i, v);
        tops = max(tops, absolute(v));
    }
    const uint32_t ratio = bits_of(highest(tops) / MOST_E4M3);
    int32_t biased = (int32_t)(ratio >> 23) + ((ratio & 0x7fffff) != 0);
    biased = ratio == 0 ? 127 : biased < 1 ? 1 : biased > 253 ? 253 : biased;
    const float inverse = power_of((uint32_t)(254 - biased));
    for (int64_t i = 0; i < d; ++i) to[i] = narrow_e4m3(wide[i] * inverse);
    return (uint8_t)biased;
}

}  // namespace
}  // namespace moonpool
