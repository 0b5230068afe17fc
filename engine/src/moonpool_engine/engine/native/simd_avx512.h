// simd.h for AVX-512 (F, BW, VL, DQ), and with bfloat16 and VNNI: vectors of 16 floats.
#pragma once

#include "simd_x86.h"

#if defined(MP_ISA_avx512bf16)
#define MP_ISA avx512bf16
#else
#define MP_ISA avx512
#endif

namespace moonpool {
namespace {

typedef __m512 vf;
typedef __m512i vi;
constexpr int W = 16;
constexpr int MAX_ROWS = 14;

MP_INLINE vi zeroi() { return _mm512_setzero_si512(); }
MP_INLINE vf zero() { return _mm512_setzero_ps(); }
MP_INLINE vf set1(float x) { return _mm512_set1_ps(x); }
MP_INLINE vf load(const float* p) { return _mm512_loadu_ps(p); }
MP_INLINE void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
MP_INLINE vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
MP_INLINE vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
MP_INLINE vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
MP_INLINE vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
MP_INLINE vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
MP_INLINE vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
MP_INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
MP_INLINE vi loadi(const void* p) { return _mm512_loadu_si512(p); }
MP_INLINE vi splat(const int32_t* p) { return _mm512_set1_epi32(*p); }
MP_INLINE vf as_float(vi x) { return _mm512_castsi512_ps(x); }
MP_INLINE vf even_bf16(vi x) { return as_float(_mm512_slli_epi32(x, 16)); }
MP_INLINE vf odd_bf16(vi x) {
    return as_float(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000)));
}
MP_INLINE vf widen_bf16(const uint16_t* p) {
    return even_bf16(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)));
}
MP_INLINE void narrow_bf16(uint16_t* p, vf x) {
#if defined(MP_ISA_avx512bf16)
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
#else
    const vi bits = _mm512_castps_si512(x);
    const vi odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const vi up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const vi nan = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const vi top = _mm512_srli_epi32(_mm512_mask_mov_epi32(up, is_nan, nan), 16);
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(top));
#endif
}
MP_INLINE vf widen_e4m3(const uint8_t* p) {
    const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
    const __m256i size = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), 7);
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8);
    return _mm512_cvtph_ps(_mm256_or_si256(size, sign));
}
MP_INLINE float sum(vf x) { return _mm512_reduce_add_ps(x); }
MP_INLINE float highest(vf x) { return _mm512_reduce_max_ps(x); }
MP_INLINE vf keep_first(vf x, int64_t n, float other) {
    const uint32_t kept = n <= 0 ? 0 : n >= 16 ? 0xffffu : (1u << n) - 1;
    return _mm512_mask_mov_ps(set1(other), (__mmask16)kept, x);
}
MP_INLINE vf absolute(vf x) { return _mm512_abs_ps(x); }
MP_INLINE vf to_float(vi x) { return _mm512_cvtepi32_ps(x); }
MP_INLINE vi widen_i8(const int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
}
MP_INLINE void narrow_i16(int16_t* p, vf x) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
}
MP_INLINE vi dot_i16(vi s, vi a, vi b) {
#if defined(MP_ISA_avx512bf16)
    return _mm512_dpwssd_epi32(s, a, b);  // whoever has bfloat16 has VNNI
#else
    return _mm512_add_epi32(s, _mm512_madd_epi16(a, b));
#endif
}
MP_INLINE vf floor(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_FLOOR); }
MP_INLINE vf fraction(vf x) { return _mm512_reduce_ps(x, _MM_FROUND_FLOOR); }
MP_INLINE vf times_power(vf x, vf n) { return _mm512_scalef_ps(x, n); }
MP_INLINE vi shift_right(vi x, int n) { return _mm512_srli_epi32(x, n); }
MP_INLINE vi shift_left(vi x, int n) { return _mm512_slli_epi32(x, n); }
MP_INLINE vi both(vi a, vi b) { return _mm512_and_si512(a, b); }
MP_INLINE vi either(vi a, vi b) { return _mm512_or_si512(a, b); }
MP_INLINE vi set1i(int32_t x) { return _mm512_set1_epi32(x); }
MP_INLINE vf load_f16(const char* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
MP_INLINE vf load_i8(const char* p) {
    return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
// s + a.even * b.even + a.odd * b.odd of bfloat16
MP_INLINE vf dot_bf16(vf s, vi a, vi b) {
#if defined(MP_ISA_avx512bf16)
    return _mm512_dpbf16_ps(s, (__m512bh)a, (__m512bh)b);
#else
    s = fma(even_bf16(a), even_bf16(b), s);
    return fma(odd_bf16(a), odd_bf16(b), s);
#endif
}

}  // namespace
}  // namespace moonpool
