// The best instruction set this CPU has of those the kernels were built for; empty if none.
#if defined(__aarch64__)
#include <sys/auxv.h>

extern "C" __attribute__((visibility("default"))) const char* moonpool_isa() {
    // As <asm/hwcap.h> numbers them; older headers lack the names.
    constexpr unsigned long ASIMD = 1ul << 1, ASIMDDP = 1ul << 20, I8MM = 1ul << 13, BF16 = 1ul << 14;
    const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    if (!(first & ASIMD)) return "";
    return first & ASIMDDP && second & I8MM && second & BF16 ? "neonbf16" : "neon";
}
#else
extern "C" __attribute__((visibility("default"))) const char* moonpool_isa() {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq");
    if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"))
        return "avx512bf16";
    if (avx512) return "avx512";
    return avx2 ? "avx2" : "";
}
#endif
