// simd.h for 64-bit Arm: a vector is two registers, so that it has the 8 floats of AVX2.
//
// Lanes, sums over lanes and roundings are those of simd_avx2.h, NaN included: without the bfloat16
// instruction the bits are the same. 32 registers of half the width hold the same tiles.
//
// MP_ISA_neon is what every AArch64 CPU has. MP_ISA_neonbf16 has the dot products of 8 bits, bfloat16
// and the mixed signs of i8mm, too.
#pragma once

#include <arm_neon.h>

#if defined(MP_ISA_neonbf16)
#define MP_ISA neonbf16
#else
#define MP_ISA neon
#endif

namespace moonpool {
namespace {

struct vf {
    float32x4_t low, high;
};
struct vi {
    int32x4_t low, high;
};
constexpr int W = 8;
constexpr int MAX_ROWS = 4;  // rows of a register tile: MAX_ROWS x 2 sums, 2 lanes of b, 1 of a

// One line into the second level: the first has too few outstanding misses to keep memory busy.
MP_INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }
// What was written is there for whoever learns of it from now on.
MP_INLINE void publish() { __atomic_thread_fence(__ATOMIC_RELEASE); }

MP_INLINE vf set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
MP_INLINE vi set1i(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
MP_INLINE vf zero() { return set1(0.f); }
MP_INLINE vi zeroi() { return set1i(0); }
MP_INLINE vf load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
MP_INLINE void store(float* p, vf x) {
    vst1q_f32(p, x.low);
    vst1q_f32(p + 4, x.high);
}
MP_INLINE vf add(vf a, vf b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
MP_INLINE vf sub(vf a, vf b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
MP_INLINE vf mul(vf a, vf b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
MP_INLINE vf div(vf a, vf b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
// b where a number is NaN, as on x86: fmax would give NaN, or the other one.
MP_INLINE float32x4_t larger(float32x4_t a, float32x4_t b) {
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}
MP_INLINE float32x4_t smaller(float32x4_t a, float32x4_t b) {
    return vbslq_f32(vcltq_f32(a, b), a, b);
}
MP_INLINE vf max(vf a, vf b) { return {larger(a.low, b.low), larger(a.high, b.high)}; }
MP_INLINE vf min(vf a, vf b) { return {smaller(a.low, b.low), smaller(a.high, b.high)}; }
MP_INLINE vf fma(vf a, vf b, vf c) {
    return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
MP_INLINE vi loadi(const void* p) {
    return {vld1q_s32((const int32_t*)p), vld1q_s32((const int32_t*)p + 4)};
}
MP_INLINE vi splat(const int32_t* p) { return {vld1q_dup_s32(p), vld1q_dup_s32(p)}; }
MP_INLINE vf as_float(vi x) {
    return {vreinterpretq_f32_s32(x.low), vreinterpretq_f32_s32(x.high)};
}
MP_INLINE vi addi(vi a, vi b) { return {vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)}; }
MP_INLINE vi both(vi a, vi b) { return {vandq_s32(a.low, b.low), vandq_s32(a.high, b.high)}; }
MP_INLINE vi either(vi a, vi b) { return {vorrq_s32(a.low, b.low), vorrq_s32(a.high, b.high)}; }
MP_INLINE vi shift_left(vi x, int n) { return {x.low << n, x.high << n}; }
// Zeros come in.
MP_INLINE vi shift_right(vi x, int n) {
    return {vreinterpretq_s32_u32(vreinterpretq_u32_s32(x.low) >> n),
            vreinterpretq_s32_u32(vreinterpretq_u32_s32(x.high) >> n)};
}
MP_INLINE vf even_bf16(vi x) { return as_float(shift_left(x, 16)); }
MP_INLINE vf odd_bf16(vi x) { return as_float(both(x, set1i((int)0xffff0000))); }
MP_INLINE vf widen_bf16(const uint16_t* p) {
    const uint16x8_t x = vld1q_u16(p);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(x), 16)),
            vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(x), 16))};
}
#if defined(MP_ISA_neonbf16)
MP_INLINE void narrow_bf16(uint16_t* p, vf x) {
    const bfloat16x8_t low = vcvtq_low_bf16_f32(x.low);
    vst1q_u16(p, vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(low, x.high)));
}
#else
MP_INLINE uint16x4_t narrow_half(float32x4_t x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t nan = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), up, nan), 16);
}
MP_INLINE void narrow_bf16(uint16_t* p, vf x) {
    vst1q_u16(p, vcombine_u16(narrow_half(x.low), narrow_half(x.high)));
}
#endif
MP_INLINE vf widen_f16(uint16x8_t x) {
    const float16x8_t half = vreinterpretq_f16_u16(x);
    return {vcvt_f32_f16(vget_low_f16(half)), vcvt_f32_f16(vget_high_f16(half))};
}
// W e4m3 as fp16 of the same bits are 2^-8 of their value, also below the least normal number.
MP_INLINE vf widen_e4m3(const uint8_t* p) {
    const uint16x8_t x = vmovl_u8(vld1_u8(p));
    const uint16x8_t size = vshlq_n_u16(vandq_u16(x, vdupq_n_u16(0x7f)), 7);
    const uint16x8_t sign = vshlq_n_u16(vandq_u16(x, vdupq_n_u16(0x80)), 8);
    return widen_f16(vorrq_u16(size, sign));
}
MP_INLINE float sum(vf x) {
    const float32x4_t s = vaddq_f32(x.low, x.high);
    const float32x2_t t = vadd_f32(vget_low_f32(s), vget_high_f32(s));
    return vget_lane_f32(t, 0) + vget_lane_f32(t, 1);
}
MP_INLINE float highest(vf x) {
    const float32x4_t s = larger(x.low, x.high);
    const float32x4_t t = larger(s, vextq_f32(s, s, 2));
    return vgetq_lane_f32(larger(t, vdupq_laneq_f32(t, 1)), 0);
}
// The first n lanes of x, the others `other`.
MP_INLINE vf keep_first(vf x, int64_t n, float other) {
    const int32_t lanes[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    const int32x4_t kept = vdupq_n_s32((int)least(n, W));
    const float32x4_t rest = vdupq_n_f32(other);
    return {vbslq_f32(vcgtq_s32(kept, vld1q_s32(lanes)), x.low, rest),
            vbslq_f32(vcgtq_s32(kept, vld1q_s32(lanes + 4)), x.high, rest)};
}
MP_INLINE vf absolute(vf x) { return {vabsq_f32(x.low), vabsq_f32(x.high)}; }
MP_INLINE vf to_float(vi x) { return {vcvtq_f32_s32(x.low), vcvtq_f32_s32(x.high)}; }
MP_INLINE vi to_int(vf x) { return {vcvtnq_s32_f32(x.low), vcvtnq_s32_f32(x.high)}; }
MP_INLINE vi widen_i8(const int8_t* p) {
    const int8x16_t x = vld1q_s8(p);
    return {vreinterpretq_s32_s16(vmovl_s8(vget_low_s8(x))),
            vreinterpretq_s32_s16(vmovl_s8(vget_high_s8(x)))};
}
MP_INLINE void narrow_i16(int16_t* p, vf x) {
    const vi whole = to_int(x);
    vst1q_s16(p, vcombine_s16(vqmovn_s32(whole.low), vqmovn_s32(whole.high)));
}
// Sums of two neighbouring 16-bit products, exact: no pair of ours reaches 2^31.
MP_INLINE int32x4_t pairs_i16(int32x4_t a, int32x4_t b) {
    const int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
    return vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
}
// The compiler may not sum whole numbers in another order, which would need more registers than are.
MP_INLINE vi dot_i16(vi s, vi a, vi b) {
    s = addi(s, {pairs_i16(a.low, b.low), pairs_i16(a.high, b.high)});
    __asm__("" : "+w"(s.low), "+w"(s.high));
    return s;
}
MP_INLINE vf floor(vf x) { return {vrndmq_f32(x.low), vrndmq_f32(x.high)}; }
MP_INLINE vf fraction(vf x) { return sub(x, floor(x)); }
// x * 2^floor(n); 0 where n < -126.
MP_INLINE vf times_power(vf x, vf n) {
    const vf bound = set1(-126.f);
    const vi power = shift_left(addi(to_int(floor(max(n, bound))), set1i(127)), 23);
    const vi there = {vreinterpretq_s32_u32(vcgeq_f32(n.low, bound.low)),
                      vreinterpretq_s32_u32(vcgeq_f32(n.high, bound.high))};
    const vf product = mul(x, as_float(power));
    const vi bits = {vreinterpretq_s32_f32(product.low), vreinterpretq_s32_f32(product.high)};
    return as_float(both(bits, there));
}
MP_INLINE vf load_f16(const char* p) { return widen_f16(vld1q_u16((const uint16_t*)p)); }
MP_INLINE vf load_i8(const char* p) {
    const int16x8_t x = vmovl_s8(vld1_s8((const int8_t*)p));
    return to_float({vmovl_s16(vget_low_s16(x)), vmovl_s16(vget_high_s16(x))});
}
// s + a.even * b.even + a.odd * b.odd of bfloat16
MP_INLINE vf dot_bf16(vf s, vi a, vi b) {
#if defined(MP_ISA_neonbf16)
    return {vbfdotq_f32(s.low, vreinterpretq_bf16_s32(a.low), vreinterpretq_bf16_s32(b.low)),
            vbfdotq_f32(s.high, vreinterpretq_bf16_s32(a.high), vreinterpretq_bf16_s32(b.high))};
#else
    s = fma(even_bf16(a), even_bf16(b), s);
    return fma(odd_bf16(a), odd_bf16(b), s);
#endif
}

#if defined(MP_ISA_neonbf16)
// Each lane's four products of 8 bits, summed on top of s: what integer linears use instead of
// dot_i16, with the high and the low bytes of a row's 16-bit numbers apart.
#define MP_BYTE_DOTS
MP_INLINE vi dot_u8_u8(vi s, vi a, vi b) {
    const uint32x4_t low = vdotq_u32(vreinterpretq_u32_s32(s.low), vreinterpretq_u8_s32(a.low),
                                     vreinterpretq_u8_s32(b.low));
    const uint32x4_t high = vdotq_u32(vreinterpretq_u32_s32(s.high), vreinterpretq_u8_s32(a.high),
                                      vreinterpretq_u8_s32(b.high));
    return {vreinterpretq_s32_u32(low), vreinterpretq_s32_u32(high)};
}
MP_INLINE vi dot_u8_i8(vi s, vi a, vi b) {
    return {vusdotq_s32(s.low, vreinterpretq_u8_s32(a.low), vreinterpretq_s8_s32(b.low)),
            vusdotq_s32(s.high, vreinterpretq_u8_s32(a.high), vreinterpretq_s8_s32(b.high))};
}
MP_INLINE vi dot_i8_i8(vi s, vi a, vi b) {
    return {vdotq_s32(s.low, vreinterpretq_s8_s32(a.low), vreinterpretq_s8_s32(b.low)),
            vdotq_s32(s.high, vreinterpretq_s8_s32(a.high), vreinterpretq_s8_s32(b.high))};
}
// W pairs of bytes at `p`, each followed by the pair of the same number at `q`.
MP_INLINE vi zip_pairs(const int8_t* p, const int8_t* q) {
    const int16x8_t first = vreinterpretq_s16_s8(vld1q_s8(p));
    const int16x8_t second = vreinterpretq_s16_s8(vld1q_s8(q));
    return {vreinterpretq_s32_s16(vzip1q_s16(first, second)),
            vreinterpretq_s32_s16(vzip2q_s16(first, second))};
}
#endif

}  // namespace
}  // namespace moonpool
