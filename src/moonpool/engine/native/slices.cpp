// Slices of KVCache blocks on their way between two arenas: summed (xxh3_64 without a seed, of more
// than 240 bytes and a multiple of 64) in the same pass over memory that moves them, or right after
// the kernel has moved them, while they are in the cache. What a peer offers is checked before use.
#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include "simd.h"

namespace moonpool {
namespace {

// As it travels, little-endian.
struct Offer {
    int64_t index, layer, block;
    uint64_t sum;
};
static_assert(sizeof(Offer) == 32, "as in the messenger's wire format");

bool within(int64_t x, int64_t end) { return (uint64_t)x < (uint64_t)end; }

// Where slices may land: row `index - first` is block `blocks[row]` of the arena.
struct Table {
    char* base;
    const int64_t* blocks;
    uint64_t* sums;
    uint8_t* cells;
    int64_t first, rows, layers, slice_bytes;
};
constexpr uint8_t VERIFIED = 1, CORRUPT = 2;
enum Outcome { DONE, OUTSIDE, AGAIN, CLOSED, BROKEN };

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

uint64_t load64(const void* p) {
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
#else
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
#endif

uint64_t fold(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

// A slice on its way: where it lies, where it goes, and its sum once it is there.
struct Passage {
    const char* from;
    char* to;
    uint64_t sum;
};

uint64_t finish(const Lanes& lanes, int64_t size) {
    uint64_t sums[8];
    keep_lanes(sums, lanes);
    uint64_t found = (uint64_t)size * P1;
    for (int i = 0; i < 4; ++i) {
        const uint8_t* key = SECRET + MERGE_KEY + 16 * i;
        found += fold(sums[2 * i] ^ load64(key), sums[2 * i + 1] ^ load64(key + 8));
    }
    found = (found ^ (found >> 37)) * MIX;
    return found ^ (found >> 32);
}

// The xxh3_64 of N slices of `size` bytes. With STREAM they are copied as they are read, so what was
// summed is what was copied, whatever the peer does to its memory meanwhile. Two at a time keep
// twice as many cache lines under way.
template <Move MOVE, int N>
MP_INLINE void pass(Passage* passages, int64_t size) {
    Lanes lanes[N];
    for (int n = 0; n < N; ++n) lanes[n] = start_lanes();
    const auto take = [&](int64_t at, const uint8_t* key) {
        for (int n = 0; n < N; ++n)
            accumulate<MOVE>(lanes[n], passages[n].from + at, passages[n].to + at, key);
    };
    int64_t at = 0, left = size / STRIPE - 1;  // stripes before the last
    for (; left >= STRIPES; left -= STRIPES) {
        for (int64_t i = 0; i < STRIPES; ++i, at += STRIPE) take(at, SECRET + 8 * i);
        for (int n = 0; n < N; ++n) scramble(lanes[n], SECRET + END_KEY);
    }
    for (int64_t i = 0; i < left; ++i, at += STRIPE) take(at, SECRET + 8 * i);
    take(at, SECRET + LAST_KEY);
    for (int n = 0; n < N; ++n) passages[n].sum = finish(lanes[n], size);
}

uint64_t sum_slice(const char* from, int64_t size) {
    Passage one = {from, nullptr, 0};
    pass<KEEP, 1>(&one, size);
    return one.sum;
}

bool expected(const Table& t, const Offer& offer) {
    return offer.index >= t.first && within(offer.index - t.first, t.rows) &&
           within(offer.layer, t.layers);
}

// The slice's number in our arena. The offer is an expected one.
int64_t number_of(const Table& t, const Offer& offer) {
    return t.blocks[offer.index - t.first] * t.layers + offer.layer;
}

// Whether what lies there is what its sender named. Only then its sum is remembered. One without a
// sum is, if `takes_unnamed`.
bool verify(const Table& t, const Offer& offer, uint64_t found, bool takes_unnamed = false) {
    const bool same = found == offer.sum || (takes_unnamed && !offer.sum);
    const int64_t cell = (offer.index - t.first) * t.layers + offer.layer;
    t.cells[cell] = same ? VERIFIED : CORRUPT;
    t.sums[number_of(t, offer)] = same ? found : 0;
    return same;
}

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

// Buffers for the next `most` bytes after the first `done` of `count` slices of `size`, of which
// `start(i)` tells where it lies; neighbours are one. Returns how many buffers are filled.
constexpr int BUFFERS = 64;
template <class Start>
int gather(Start start, int64_t size, int64_t count, int64_t done, int64_t most, iovec* buffers) {
    int used = 0;
    for (int64_t i = done / size; i < count && most > 0; ++i) {
        const int64_t skip = i == done / size ? done % size : 0;
        char* place = start(i) + skip;
        const int64_t length = least(size - skip, most);
        if (used && (char*)buffers[used - 1].iov_base + buffers[used - 1].iov_len == place)
            buffers[used - 1].iov_len += length;
        else if (used < BUFFERS)
            buffers[used++] = {place, (size_t)length};
        else
            break;
        most -= length;
    }
    return used;
}

constexpr int64_t GROUP_BYTES = 256 << 10;  // received, then summed: small enough for the L2 cache
constexpr int64_t SENT_BYTES = 256 << 10;   // with one call: more of them keep the peer waiting

}  // namespace
}  // namespace moonpool

using namespace moonpool;

// Fills in the sums of our own slices: those remembered, and computed from the bytes the others,
// which are remembered from now on. Stops behind the offer with which `most_bytes` have been
// summed; if that is 0, nothing is, and what is not remembered stays 0. `named` says how many it did.
// 1: one is outside the arena.
MP_EXPORT(moonpool_slices_name)(Offer* offers, int64_t count, const char* base, uint64_t* sums,
                                int64_t blocks, int64_t layers, int64_t slice_bytes,
                                int64_t most_bytes, int64_t* named) {
    int64_t summed = 0, i = 0;
    for (; i < count && (!most_bytes || summed < most_bytes); ++i) {
        Offer& offer = offers[i];
        if (!within(offer.block, blocks) || !within(offer.layer, layers)) return OUTSIDE;
        const int64_t number = offer.block * layers + offer.layer;
        if (!sums[number] && most_bytes) {
            sums[number] = sum_slice(base + number * slice_bytes, slice_bytes);
            summed += slice_bytes;
        }
        offer.sum = sums[number];
    }
    *named = i;
    return DONE;
}

// From a peer's arena, mapped at `from`, into ours. `corrupt` counts what was not as named; slices
// without a sum are taken as they are, and summed.
MP_EXPORT(moonpool_slices_copy)(const Offer* offers, int64_t count, const Table* table,
                                const char* from, int64_t from_blocks, int64_t* corrupt) {
    const Table& t = *table;
    for (int64_t i = 0; i < count; ++i)
        if (!expected(t, offers[i]) || !within(offers[i].block, from_blocks)) return OUTSIDE;
    Passage pair[2];
    for (int64_t i = 0; i < count; i += 2) {
        const int64_t width = least(2, count - i);
        for (int64_t n = 0; n < width; ++n) {
            const Offer& offer = offers[i + n];
            pair[n].from = from + (offer.block * t.layers + offer.layer) * t.slice_bytes;
            pair[n].to = t.base + number_of(t, offer) * t.slice_bytes;
        }
        if (width == 2)
            pass<STREAM, 2>(pair, t.slice_bytes);
        else
            pass<STREAM, 1>(pair, t.slice_bytes);
        for (int64_t n = 0; n < width; ++n)
            *corrupt += !verify(t, offers[i + n], pair[n].sum, true);
    }
    _mm_sfence();
    return DONE;
}

// From a socket into our arena, until `deadline_ns` or the socket's own timeout, whichever comes
// first. `state` is bytes that are there, slices verified, corrupt ones, errno: to go on, call
// again with it.
MP_EXPORT(moonpool_slices_receive)(int fd, const Offer* offers, int64_t count, const Table* table,
                                   int64_t deadline_ns, int64_t* state) {
    const Table& t = *table;
    const int64_t total = count * t.slice_bytes;
    for (int64_t i = 0; i < count; ++i)
        if (!expected(t, offers[i])) return OUTSIDE;
    while (true) {
        for (; state[1] < state[0] / t.slice_bytes; ++state[1]) {
            const Offer& offer = offers[state[1]];
            const char* place = t.base + number_of(t, offer) * t.slice_bytes;
            state[2] += !verify(t, offer, sum_slice(place, t.slice_bytes));
        }
        if (state[0] >= total) return DONE;
        if (now_ns() >= deadline_ns) return AGAIN;
        iovec buffers[BUFFERS];
        msghdr message = {};
        message.msg_iov = buffers;
        const auto start = [&](int64_t i) { return t.base + number_of(t, offers[i]) * t.slice_bytes; };
        message.msg_iovlen = gather(start, t.slice_bytes, count, state[0], GROUP_BYTES, buffers);
        const ssize_t got = recvmsg(fd, &message, MSG_WAITALL);
        if (got == 0) return CLOSED;
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            state[3] = errno;
            return errno == EAGAIN || errno == EWOULDBLOCK ? AGAIN : BROKEN;
        }
        state[0] += got;
    }
}

// `head`, and behind it named slices of our own arena, into a socket. `state` is bytes sent, errno.
MP_EXPORT(moonpool_slices_send)(int fd, const char* head, int64_t head_bytes, const Offer* offers,
                                int64_t count, char* base, int64_t layers, int64_t slice_bytes,
                                int64_t deadline_ns, int64_t* state) {
    const int64_t total = head_bytes + count * slice_bytes;
    const auto start = [&](int64_t i) {
        return base + (offers[i].block * layers + offers[i].layer) * slice_bytes;
    };
    while (state[0] < total) {
        iovec buffers[BUFFERS + 1];
        int used = 0;
        if (state[0] < head_bytes)
            buffers[used++] = {(char*)head + state[0], (size_t)(head_bytes - state[0])};
        const int64_t done = state[0] < head_bytes ? 0 : state[0] - head_bytes;
        used += gather(start, slice_bytes, count, done, SENT_BYTES, buffers + used);
        msghdr message = {};
        message.msg_iov = buffers;
        message.msg_iovlen = used;
        if (now_ns() >= deadline_ns) return AGAIN;
        const ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0) {
            state[1] = errno;
            return errno == EAGAIN || errno == EWOULDBLOCK ? AGAIN : BROKEN;
        }
        state[0] += sent;
    }
    return DONE;
}
