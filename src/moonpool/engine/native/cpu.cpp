// The best instruction set this CPU has of those the kernels were built for; empty if none.
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
