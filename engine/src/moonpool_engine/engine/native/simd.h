// The vector vocabulary of the kernels, once per instruction set.
//
// Every kernel file is compiled once for each instruction set (build.py defines MP_ISA_*), and
// sees only the names below, so a kernel is written once. All are in an anonymous namespace: two
// builds of one kernel must never be merged by the linker.
//
// vf  W floats          vi  W 32-bit lanes (a lane holds one float, or two neighbouring bfloat16)
// F32 / B16             element types: how to load, store and multiply lanes of them
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
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

}  // namespace
}  // namespace moonpool

#if defined(MP_ISA_avx2)
#include "simd_avx2.h"
#elif defined(MP_ISA_avx512) || defined(MP_ISA_avx512bf16)
#include "simd_avx512.h"
#else
#include "simd_neon.h"
#endif

namespace moonpool {
namespace {

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
    MP_INLINE vf dot(vf s, vi a, vi b) { return dot_bf16(s, a, b); }
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
// moves by `ahead_step`.
template <class L, int ROWS, int VECS, int A_ROW, int A_LANE, int AHEAD>
MP_INLINE void accumulate(vf (&sums)[ROWS][VECS], const int32_t* a, const int32_t* b,
                          int64_t b_stride, int64_t lanes, const char* ahead, int64_t ahead_step) {
    vf own[ROWS][VECS];  // whose address nobody has: the compiler keeps them in registers
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) own[r][v] = sums[r][v];
    }
    for (int64_t k = 0; k < lanes; ++k) {
        vi right[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) right[v] = loadi(b + v * W);
        if (AHEAD > 0) {
#pragma GCC unroll 4
            for (int v = 0; v < AHEAD; ++v) fetch(ahead + 64 * v);
            ahead += ahead_step;
        }
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; ++r) {
            const vi left = splat(a + r * A_ROW);
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v) own[r][v] = L::dot(own[r][v], left, right[v]);
        }
        a += A_LANE;
        b += b_stride;
    }
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) sums[r][v] = own[r][v];
    }
}

// Memory that a thread keeps from call to call, so that no call pays for page faults.
struct Scratch {
    char* data = nullptr;
    size_t size = 0;
    ~Scratch() { free(data); }
    char* take(size_t bytes) {
        if (bytes > size) {
            free(data);
            void* more = nullptr;
            if (posix_memalign(&more, 64, bytes)) __builtin_trap();
            data = (char*)more;
            size = bytes;
        }
        return data;
    }
};

}  // namespace
}  // namespace moonpool
