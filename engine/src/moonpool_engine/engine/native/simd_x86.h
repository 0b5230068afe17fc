// What the x86 instruction sets have in common.
#pragma once

#include <immintrin.h>

namespace moonpool {
namespace {

// One line into the second level: the first has too few outstanding misses to keep memory busy.
MP_INLINE void fetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
// What was written around the cache is there for whoever learns of it from now on.
MP_INLINE void publish() { _mm_sfence(); }

}  // namespace
}  // namespace moonpool
