// A stream of bytes from one process to another through memory both have mapped: one writer, one
// reader. Whoever has nothing to do looks again and again for a while, then sleeps on a futex.
//
// The other side is another process: what it wrote of its counter is checked before it is used.
#pragma once
#include <errno.h>
#include <linux/futex.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

namespace moonpool {

// At the beginning of the memory; the bytes follow from DATA on.
struct Ring {
    alignas(64) std::atomic<uint64_t> written;
    uint64_t read_seen;  // the writer's own note
    alignas(64) std::atomic<uint64_t> read;
    alignas(64) std::atomic<uint32_t> reader_sleeps;
    alignas(64) std::atomic<uint32_t> writer_sleeps;
};
constexpr int64_t DATA = 4096;
static_assert(sizeof(Ring) <= DATA, "the counters have a page of their own");

// How long one side looks before it sleeps. A core that was taken away while it looked is wanted by
// somebody: then it sleeps at once, and looks only briefly the next `shy` times.
struct Waiter {
    int64_t spin_ns;
    int64_t shy;
};
constexpr int64_t TAKEN_NS = 200000, BRIEF_NS = 2000, SHY = 256;

// The head of every message; moonpool_engine/attention_offload/wire.py has the same.
struct Header {
    uint32_t num_bytes;
    uint8_t kind, unused;
    uint16_t layer;
    uint32_t step, busy_ns;
};
static_assert(sizeof(Header) == 16, "as it travels");

struct Piece {
    char* at;
    int64_t size;
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

// Tells the core that this thread only waits.
inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

inline long futex(const std::atomic<uint64_t>& word, int what, uint32_t value,
                  const timespec* timeout) {
    return syscall(SYS_futex, (const uint32_t*)&word, what, value, timeout, nullptr, 0);
}

// Looks for a while whether `counter` is not `seen` any more.
inline bool looks(const std::atomic<uint64_t>& counter, uint64_t seen, Waiter& waiter,
                  int64_t began, int64_t timeout_ns) {
    int64_t now = began, spin_ns = waiter.spin_ns;
    if (waiter.shy) --waiter.shy, spin_ns = least(spin_ns, BRIEF_NS);
    while (now - began < least(spin_ns, timeout_ns)) {
        for (int i = 0; i < 16; ++i) {
            if (counter.load(std::memory_order_acquire) != seen) return true;
            relax();
        }
        const int64_t before = now;
        now = now_ns();
        if (now - before > TAKEN_NS) {
            waiter.shy = SHY;
            break;
        }
    }
    return counter.load(std::memory_order_acquire) != seen;
}

// Until `counter` is not `seen` any more; false after `timeout_ns`.
inline bool wait_for(const std::atomic<uint64_t>& counter, uint64_t seen,
                     std::atomic<uint32_t>& sleeps, Waiter& waiter, int64_t timeout_ns) {
    const int64_t began = now_ns();
    if (looks(counter, seen, waiter, began, timeout_ns)) return true;
    while (counter.load(std::memory_order_acquire) == seen) {
        const int64_t left = timeout_ns - (now_ns() - began);
        if (left <= 0) return false;
        sleeps.store(1);
        if (counter.load() == seen) {
            const timespec limit = {(time_t)(left / 1000000000), (long)(left % 1000000000)};
            futex(counter, FUTEX_WAIT, (uint32_t)seen, &limit);
        }
        sleeps.store(0);
    }
    return true;
}

inline void wake(const std::atomic<uint64_t>& counter, std::atomic<uint32_t>& sleeps) {
    if (sleeps.load() && sleeps.exchange(0)) futex(counter, FUTEX_WAKE, 1, nullptr);
}

// Moves what is left after `done` bytes of head and body; returns how many are done then: not all
// only if the other side did nothing for `timeout_ns`, -1 if its counter is wrong. The reader's
// counter is looked up only when what was seen of it leaves no room: each look costs a cache miss.
inline int64_t ring_write(char* memory, int64_t capacity, Piece head, Piece body, int64_t done,
                          Waiter& waiter, int64_t timeout_ns) {
    Ring& ring = *(Ring*)memory;
    const int64_t total = head.size + body.size;
    while (done < total) {
        const uint64_t written = ring.written.load(std::memory_order_relaxed);
        uint64_t read = ring.read_seen;
        if (written - read + (uint64_t)(total - done) > (uint64_t)capacity)
            ring.read_seen = read = ring.read.load(std::memory_order_acquire);
        if (written - read > (uint64_t)capacity) return -1;
        const int64_t room = capacity - (int64_t)(written - read);
        if (!room) {
            if (!wait_for(ring.read, read, ring.writer_sleeps, waiter, timeout_ns)) return done;
            continue;
        }
        int64_t moved = 0, at = (int64_t)(written % (uint64_t)capacity);
        while (moved < room && done < total) {
            const bool first = done < head.size;
            const char* from = first ? head.at + done : body.at + (done - head.size);
            const int64_t left = (first ? head.size : total) - done;
            const int64_t size = least(least(left, room - moved), capacity - at);
            memcpy(memory + DATA + at, from, size);
            moved += size, done += size;
            if ((at += size) == capacity) at = 0;
        }
        ring.written.store(written + moved);
        wake(ring.written, ring.reader_sleeps);
    }
    return done;
}

// How much is to be read: if `head` is a Header, the body only if it has the size that is told.
inline int64_t expected(Piece head, Piece body, int64_t done) {
    const bool told = head.size && done >= head.size;
    return told && ((Header*)head.at)->num_bytes != body.size ? head.size : head.size + body.size;
}

// As `ring_write`; the writer is told once for all that was there.
inline int64_t ring_read(char* memory, int64_t capacity, Piece head, Piece body, int64_t done,
                         Waiter& waiter, int64_t timeout_ns) {
    Ring& ring = *(Ring*)memory;
    while (done < expected(head, body, done)) {
        const uint64_t read = ring.read.load(std::memory_order_relaxed);
        const uint64_t written = ring.written.load(std::memory_order_acquire);
        const int64_t there = (int64_t)(written - read);
        if (written - read > (uint64_t)capacity) return -1;
        if (!there) {
            if (!wait_for(ring.written, written, ring.reader_sleeps, waiter, timeout_ns))
                return done;
            continue;
        }
        int64_t moved = 0, at = (int64_t)(read % (uint64_t)capacity);
        while (moved < there && done < expected(head, body, done)) {
            const bool first = done < head.size;
            char* to = first ? head.at + done : body.at + (done - head.size);
            const int64_t left = (first ? head.size : head.size + body.size) - done;
            const int64_t size = least(least(there - moved, left), capacity - at);
            memcpy(to, memory + DATA + at, size);
            moved += size, done += size;
            if ((at += size) == capacity) at = 0;
        }
        ring.read.store(read + moved);
        wake(ring.read, ring.writer_sleeps);
    }
    return done;
}

}  // namespace moonpool

#define MP_PLAIN extern "C" __attribute__((visibility("default")))
