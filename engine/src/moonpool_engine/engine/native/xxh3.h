// xxh3: constants, and the sums of one stripe of 64 bytes in vectors, once per instruction set.
#pragma once

#include "simd.h"

namespace moonpool {
namespace {

// xxh3: the published constants.
constexpr uint64_t P1 = 0x9E3779B185EBCA87, P2 = 0xC2B2AE3D27D4EB4F, P3 = 0x165667B19E3779F9,
                   P4 = 0x85EBCA77C2B2AE63, P5 = 0x27D4EB2F165667C5, MIX = 0x165667919E3779F9;
constexpr uint64_t Q1 = 0x9E3779B1, Q2 = 0x85EBCA77, Q3 = 0xC2B2AE3D;
constexpr int64_t STRIPE = 64, STRIPES = 16, LAST_KEY = 121, END_KEY = 128, MERGE_KEY = 11;
constexpr uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad,
    0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3,
    0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc,
    0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65,
    0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9,
    0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb,
    0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0,
    0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d,
    0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

MP_INLINE uint64_t load64(const void* p) {
    uint64_t x;
    memcpy(&x, p, sizeof(x));
    return x;
}

// What becomes of a stripe beside being summed. STREAM goes around the cache: the target is not
// read first, which is a third of a copy's traffic. Its address is a multiple of 64.
enum Move { KEEP, STREAM };

#if defined(MP_ISA_avx2)
struct Lanes {
    __m256i low, high;
};
MP_INLINE Lanes start_lanes() {
    return {_mm256_setr_epi64x(Q3, P1, P2, P3), _mm256_setr_epi64x(P4, Q2, P5, Q1)};
}
template <Move MOVE>
MP_INLINE __m256i take(__m256i sum, const char* from, char* to, const uint8_t* key) {
    const __m256i data = _mm256_loadu_si256((const __m256i*)from);
    if (MOVE == STREAM) _mm256_stream_si256((__m256i*)to, data);
    const __m256i mixed = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i*)key));
    const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    const __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(sum, _mm256_add_epi64(product, swapped));
}
template <Move MOVE>
MP_INLINE void accumulate(Lanes& sums, const char* from, char* to, const uint8_t* key) {
    sums.low = take<MOVE>(sums.low, from, to, key);
    sums.high = take<MOVE>(sums.high, from + 32, to + 32, key + 32);
}
MP_INLINE __m256i scramble_half(__m256i sum, const uint8_t* key) {
    const __m256i prime = _mm256_set1_epi64x(Q1);
    sum = _mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47));
    sum = _mm256_xor_si256(sum, _mm256_loadu_si256((const __m256i*)key));
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(sum, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(sum, prime), _mm256_slli_epi64(high, 32));
}
MP_INLINE void scramble(Lanes& sums, const uint8_t* key) {
    sums.low = scramble_half(sums.low, key);
    sums.high = scramble_half(sums.high, key + 32);
}
MP_INLINE void keep_lanes(uint64_t* to, const Lanes& sums) { memcpy(to, &sums, sizeof(sums)); }
#elif defined(__x86_64__)
typedef __m512i Lanes;
MP_INLINE Lanes start_lanes() { return _mm512_setr_epi64(Q3, P1, P2, P3, P4, Q2, P5, Q1); }
template <Move MOVE>
MP_INLINE void accumulate(Lanes& sum, const char* from, char* to, const uint8_t* key) {
    const __m512i data = _mm512_loadu_si512(from);
    if (MOVE == STREAM) _mm512_stream_si512((__m512i*)to, data);
    const __m512i mixed = _mm512_xor_si512(data, _mm512_loadu_si512(key));
    const __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
    const __m512i swapped = _mm512_shuffle_epi32(data, (_MM_PERM_ENUM)_MM_SHUFFLE(1, 0, 3, 2));
    sum = _mm512_add_epi64(sum, _mm512_add_epi64(product, swapped));
}
MP_INLINE void scramble(Lanes& sum, const uint8_t* key) {
    const __m512i prime = _mm512_set1_epi64(Q1);
    sum = _mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47));
    sum = _mm512_xor_si512(sum, _mm512_loadu_si512(key));
    const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(sum, 32), prime);
    sum = _mm512_add_epi64(_mm512_mul_epu32(sum, prime), _mm512_slli_epi64(high, 32));
}
MP_INLINE void keep_lanes(uint64_t* to, const Lanes& sum) { _mm512_storeu_si512(to, sum); }
#else
struct Lanes {
    uint64x2_t part[4];
};
MP_INLINE Lanes start_lanes() {
    const uint64_t start[8] = {Q3, P1, P2, P3, P4, Q2, P5, Q1};
    return {vld1q_u64(start), vld1q_u64(start + 2), vld1q_u64(start + 4), vld1q_u64(start + 6)};
}
// A store of Arm writes whole lines without reading them first, so STREAM needs none of its own.
template <Move MOVE>
MP_INLINE void accumulate(Lanes& sums, const char* from, char* to, const uint8_t* key) {
    for (int i = 0; i < 4; ++i) {
        const uint8x16_t bytes = vld1q_u8((const uint8_t*)from + 16 * i);
        if (MOVE == STREAM) vst1q_u8((uint8_t*)to + 16 * i, bytes);
        const uint64x2_t data = vreinterpretq_u64_u8(bytes);
        const uint64x2_t mixed = vreinterpretq_u64_u8(veorq_u8(bytes, vld1q_u8(key + 16 * i)));
        const uint64x2_t swapped = vextq_u64(data, data, 1);
        const uint64x2_t sum = vaddq_u64(sums.part[i], swapped);
        sums.part[i] = vmlal_u32(sum, vmovn_u64(mixed), vshrn_n_u64(mixed, 32));
    }
}
MP_INLINE void scramble(Lanes& sums, const uint8_t* key) {
    const uint32x2_t prime = vdup_n_u32((uint32_t)Q1);
    for (int i = 0; i < 4; ++i) {
        uint64x2_t sum = sums.part[i];
        sum = veorq_u64(sum, vshrq_n_u64(sum, 47));
        sum = veorq_u64(sum, vreinterpretq_u64_u8(vld1q_u8(key + 16 * i)));
        const uint64x2_t high = vshlq_n_u64(vmull_u32(vshrn_n_u64(sum, 32), prime), 32);
        sums.part[i] = vmlal_u32(high, vmovn_u64(sum), prime);
    }
}
MP_INLINE void keep_lanes(uint64_t* to, const Lanes& sums) { memcpy(to, &sums, sizeof(sums)); }
#endif

}  // namespace
}  // namespace moonpool
