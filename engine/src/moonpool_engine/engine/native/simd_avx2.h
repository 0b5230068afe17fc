// simd.h for AVX2, FMA and F16C: vectors of 8 floats.
#pragma once

#include "simd_x86.h"

#define MP_ISA avx2

namespace moonpool {
namespace {

typedef __m256 vf;
typedef __m256i vi;
constexpr int W = 8;
constexpr int MAX_ROWS = 4;  // rows of a register tile: MAX_ROWS x 2 sums, 2 lanes of b, 1 of a

MP_INLINE vi zeroi() { return _mm256_setzero_si256(); }
MP_INLINE vf zero() { return _mm256_setzero_ps(); }
MP_INLINE vf set1(float x) { return _mm256_set1_ps(x); }
MP_INLINE vf load(const float* p) { return _mm256_loadu_ps(p); }
MP_INLINE void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
MP_INLINE vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
MP_INLINE vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
MP_INLINE vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
MP_INLINE vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
MP_INLINE vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
MP_INLINE vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
MP_INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
MP_INLINE vi loadi(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
MP_INLINE vi splat(const int32_t* p) { return _mm256_set1_epi32(*p); }
MP_INLINE vf as_float(vi x) { return _mm256_castsi256_ps(x); }
MP_INLINE vf even_bf16(vi x) { return as_float(_mm256_slli_epi32(x, 16)); }
MP_INLINE vf odd_bf16(vi x) {
    return as_float(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)));
}
MP_INLINE vf widen_bf16(const uint16_t* p) {
    return even_bf16(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)));
}
MP_INLINE void narrow_bf16(uint16_t* p, vf x) {
    const vi bits = _mm256_castps_si256(x);
    const vi odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const vi up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const vi nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const vi is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const vi top = _mm256_srli_epi32(_mm256_blendv_epi8(up, nan, is_nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(top, top), 0x08);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
// W e4m3 as fp16 of the same bits are 2^-8 of their value, also below the least normal number.
MP_INLINE vf widen_e4m3(const uint8_t* p) {
    const __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
    const __m128i size = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x7f)), 7);
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x80)), 8);
    return _mm256_cvtph_ps(_mm_or_si128(size, sign));
}
MP_INLINE float sum(vf x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
MP_INLINE float highest(vf x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
// The first n lanes of x, the others `other`.
MP_INLINE vf keep_first(vf x, int64_t n, float other) {
    const vi lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const vi kept = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)least(n, W)), lane);
    return _mm256_blendv_ps(set1(other), x, as_float(kept));
}
MP_INLINE vf absolute(vf x) { return _mm256_andnot_ps(set1(-0.f), x); }
MP_INLINE vf to_float(vi x) { return _mm256_cvtepi32_ps(x); }
MP_INLINE vi widen_i8(const int8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
}
MP_INLINE void narrow_i16(int16_t* p, vf x) {
    const vi whole = _mm256_cvtps_epi32(x);
    const vi packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(whole, whole), 0x08);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
// The compiler may not sum whole numbers in another order, which would need more registers than are.
MP_INLINE vi chained(vi x) {
    __asm__("" : "+x"(x));
    return x;
}
// Sums of two neighbouring 16-bit products, exact: no pair of ours reaches 2^31.
MP_INLINE vi dot_i16(vi s, vi a, vi b) {
    return chained(_mm256_add_epi32(s, _mm256_madd_epi16(a, b)));
}
MP_INLINE vf floor(vf x) { return _mm256_floor_ps(x); }
MP_INLINE vf fraction(vf x) { return sub(x, floor(x)); }
// x * 2^floor(n); 0 where n < -126.
MP_INLINE vf times_power(vf x, vf n) {
    const vi whole = _mm256_cvtps_epi32(floor(max(n, set1(-126.f))));
    const vi power = _mm256_slli_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(mul(x, as_float(power)), _mm256_cmp_ps(n, set1(-126.f), _CMP_GE_OQ));
}
MP_INLINE vi shift_right(vi x, int n) { return _mm256_srli_epi32(x, n); }
MP_INLINE vi shift_left(vi x, int n) { return _mm256_slli_epi32(x, n); }
MP_INLINE vi both(vi a, vi b) { return _mm256_and_si256(a, b); }
MP_INLINE vi either(vi a, vi b) { return _mm256_or_si256(a, b); }
MP_INLINE vi set1i(int32_t x) { return _mm256_set1_epi32(x); }
MP_INLINE vf load_f16(const char* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
MP_INLINE vf load_i8(const char* p) {
    return to_float(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
// s + a.even * b.even + a.odd * b.odd of bfloat16
MP_INLINE vf dot_bf16(vf s, vi a, vi b) {
    s = fma(even_bf16(a), even_bf16(b), s);
    return fma(odd_bf16(a), odd_bf16(b), s);
}

// What only linears of one row use.
#define MP_ROW_TILES
MP_INLINE vi add_i16(vi a, vi b) { return chained(_mm256_add_epi16(a, b)); }
// Sums of two neighbouring products of bytes, in 16 bits: none of ours reaches 2^15.
MP_INLINE vi pairs_u8_i8(vi a, vi b) { return _mm256_maddubs_epi16(a, b); }
// Every second byte of x, the second one first.
MP_INLINE vi odd_bytes(vi x) { return _mm256_srli_epi16(x, 8); }

}  // namespace
}  // namespace moonpool
