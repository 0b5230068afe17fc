// Slices of KVCache blocks on their way between two arenas: summed (xxh3_64 without a seed, of more
// than 240 bytes and a multiple of 64) in the same pass over memory that moves them, or right after
// the kernel has moved them, while they are in the cache. What a peer offers is checked before use.
#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include "xxh3.h"

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
// summed is what was copied, whatever the peer does to its memory meanwhile.
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

// Copies `count` slices, at most `N`: several at a time keep more cache lines under way.
constexpr int64_t TOGETHER = 4;
template <int N = TOGETHER>
void copy_together(Passage* passages, int64_t count, int64_t size) {
    if constexpr (N > 1)
        if (count < N) return copy_together<N - 1>(passages, count, size);
    pass<STREAM, N>(passages, size);
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
    Passage group[TOGETHER];
    for (int64_t i = 0; i < count; i += TOGETHER) {
        const int64_t width = least(TOGETHER, count - i);
        for (int64_t n = 0; n < width; ++n) {
            const Offer& offer = offers[i + n];
            group[n].from = from + (offer.block * t.layers + offer.layer) * t.slice_bytes;
            group[n].to = t.base + number_of(t, offer) * t.slice_bytes;
        }
        copy_together(group, width, t.slice_bytes);
        for (int64_t n = 0; n < width; ++n)
            *corrupt += !verify(t, offers[i + n], group[n].sum, true);
    }
    publish();
    return DONE;
}

// Slices between any two places of this process, which the caller answers for: `to` are multiples
// of 64. `sums` gets what was copied.
MP_EXPORT(moonpool_slices_move)(const char* const* from, char* const* to, uint64_t* sums,
                                int64_t count, int64_t size) {
    Passage group[TOGETHER];
    for (int64_t i = 0; i < count; i += TOGETHER) {
        const int64_t width = least(TOGETHER, count - i);
        for (int64_t n = 0; n < width; ++n) group[n] = {from[i + n], to[i + n], 0};
        copy_together(group, width, size);
        for (int64_t n = 0; n < width; ++n) sums[i + n] = group[n].sum;
    }
    publish();
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
