// The vector vocabulary of the kernels, once per instruction set.
//
// Every kernel file is compiled once for each instruction set (build.py defines MP_ISA_*), and
// sees only the names below, so a kernel is written once. All are in an anonymous namespace: two
// builds of one kernel must never be merged by the linker.
//
// vf  W floats          vi  W 32-bit lanes (a lane holds one float, or two neighbouring bfloat16)
// F32 / B16             element types: how to load, store and multiply lanes of them
#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define MP_JOIN2(a, b) a##_##b
#define MP_JOIN(a, b) MP_JOIN2(a, b)
// All exported functions return 0, or 1 if what they were asked lies outside their tables.
#define MP_EXPORT(name) extern "C" __attribute__((visibility("default"))) int MP_JOIN(name, MP_ISA)
#define MP_INLINE static inline __attribute__((always_inline))

namespace moonpool {
namespace {

MP_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
MP_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#if defined(MP_ISA_avx2)

#define MP_ISA avx2
typedef __m256 vf;
typedef __m256i vi;
constexpr int W = 8;
constexpr int MAX_ROWS = 4;  // rows of a register tile: MAX_ROWS x 2 sums, 2 lanes of b, 1 of a

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
MP_INLINE vi low_halves(vi x) { return _mm256_and_si256(x, _mm256_set1_epi32(0xffff)); }
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
// Sums of two neighbouring 16-bit products, exact: no pair of ours reaches 2^31.
MP_INLINE vi dot_i16(vi s, vi a, vi b) { return _mm256_add_epi32(s, _mm256_madd_epi16(a, b)); }
MP_INLINE vf floor(vf x) { return _mm256_floor_ps(x); }
MP_INLINE vf fraction(vf x) { return sub(x, floor(x)); }
// x * 2^floor(n); 0 where n < -126.
MP_INLINE vf times_power(vf x, vf n) {
    const vi whole = _mm256_cvtps_epi32(floor(max(n, set1(-126.f))));
    const vi power = _mm256_slli_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(mul(x, as_float(power)), _mm256_cmp_ps(n, set1(-126.f), _CMP_GE_OQ));
}

#else

#if defined(MP_ISA_avx512bf16)
#define MP_ISA avx512bf16
#else
#define MP_ISA avx512
#endif
typedef __m512 vf;
typedef __m512i vi;
constexpr int W = 16;
constexpr int MAX_ROWS = 14;

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
MP_INLINE vi low_halves(vi x) { return _mm512_and_si512(x, _mm512_set1_epi32(0xffff)); }
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

#endif

// 2^f for f in [0, 1]: a polynomial of our own fit, 2e-9 off before rounding, exactly 1 at 0.
MP_INLINE vf exp2_fraction(vf f) {
    vf p = set1(0.000216129149f);
    p = fma(p, f, set1(0.00124678458f));
    p = fma(p, f, set1(0.00967545155f));
    p = fma(p, f, set1(0.0554852821f));
    p = fma(p, f, set1(0.240229309f));
    p = fma(p, f, set1(0.693147063f));
    return fma(p, f, set1(1.f));
}
// 2^x for x <= 127: exactly 1 at 0, exactly 0 at -inf.
MP_INLINE vf exp2v(vf x) { return times_power(exp2_fraction(fraction(x)), x); }
// e^x for x <= 88, with log2(e) in two parts so that a large |x| loses nothing.
MP_INLINE vf expv(vf x) {
    const vf n = floor(mul(x, set1(1.44269504f)));
    const vf f = fma(x, set1(1.44269504f), sub(zero(), n));
    return times_power(exp2_fraction(fma(x, set1(1.92596299e-8f), f)), n);
}

// tanh(x): exactly 0 at 0.
MP_INLINE vf tanhv(vf x) {
    const vf e = expv(mul(min(max(x, set1(-44.f)), set1(44.f)), set1(-2.f)));
    return sub(div(set1(2.f), add(set1(1.f), e)), set1(1.f));
}

struct F32 {
    typedef float T;
    static constexpr int PACK = 1;
    MP_INLINE vf dot(vf s, vi a, vi b) { return moonpool::fma(as_float(a), as_float(b), s); }
    MP_INLINE vf load(const T* p) { return moonpool::load(p); }
    MP_INLINE void store(T* p, vf x) { moonpool::store(p, x); }
};

struct B16 {
    typedef uint16_t T;
    static constexpr int PACK = 2;
    // s + a.even * b.even + a.odd * b.odd
    MP_INLINE vf dot(vf s, vi a, vi b) {
#if defined(MP_ISA_avx512bf16)
        return _mm512_dpbf16_ps(s, (__m512bh)a, (__m512bh)b);
#else
        s = moonpool::fma(even_bf16(a), even_bf16(b), s);
        return moonpool::fma(odd_bf16(a), odd_bf16(b), s);
#endif
    }
    MP_INLINE vf load(const T* p) { return widen_bf16(p); }
    MP_INLINE void store(T* p, vf x) { narrow_bf16(p, x); }
};

template <class L>
MP_INLINE vf load_first(const typename L::T* p, int n) {
    if (n >= W) return L::load(p);
    typename L::T lanes[W] = {};
    memcpy(lanes, p, n * sizeof(lanes[0]));
    return L::load(lanes);
}
template <class L>
MP_INLINE void store_first(typename L::T* p, vf x, int n) {
    if (n >= W) return L::store(p, x);
    typename L::T lanes[W];
    L::store(lanes, x);
    memcpy(p, lanes, n * sizeof(lanes[0]));
}

// sums[r][v] += sum over k of a[r][k] * b[k][v]: the one inner loop of linears and attention.
// Element (r, k) of `a` is lane a[r * A_ROW + k * A_LANE]; b has b_stride lanes per k. A sum is
// one chain of `dot`s in rising k whatever ROWS is: that, and nothing else, makes rows
// independent of each other. On the way, AHEAD lines per k are fetched from `ahead` on, which
// moves by `ahead_step`: into the second level, as the first has too few outstanding misses to
// keep memory busy.
template <class L, int ROWS, int VECS, int A_ROW, int A_LANE, int AHEAD>
MP_INLINE void accumulate(vf (&sums)[ROWS][VECS], const int32_t* a, const int32_t* b,
                          int64_t b_stride, int64_t lanes, const char* ahead, int64_t ahead_step) {
    for (int64_t k = 0; k < lanes; ++k) {
        vi right[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) right[v] = loadi(b + v * W);
        if (AHEAD > 0) {
#pragma GCC unroll 4
            for (int v = 0; v < AHEAD; ++v) _mm_prefetch(ahead + 64 * v, _MM_HINT_T1);
            ahead += ahead_step;
        }
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; ++r) {
            const vi left = splat(a + r * A_ROW);
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v) sums[r][v] = L::dot(sums[r][v], left, right[v]);
        }
        a += A_LANE;
        b += b_stride;
    }
}

// Memory that a thread keeps from call to call, so that no call pays for page faults.
struct Scratch {
    char* data = nullptr;
    size_t size = 0;
    ~Scratch() { _mm_free(data); }
    char* take(size_t bytes) {
        if (bytes > size) {
            _mm_free(data);
            data = (char*)_mm_malloc(bytes, 64);
            size = data ? bytes : 0;
            if (!data) __builtin_trap();
        }
        return data;
    }
};

}  // namespace
}  // namespace moonpool
