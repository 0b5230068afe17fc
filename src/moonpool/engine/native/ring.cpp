// A stream of bytes from one process to another through memory both have mapped: one writer, one
// reader. Whoever has nothing to do spins for a while, then sleeps on a futex.
//
// The other side is another process: what it wrote of its counter is checked before it is used.
#include <errno.h>
#include <linux/futex.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

namespace {

// At the beginning of the memory; the bytes follow from DATA on.
struct Ring {
    alignas(64) std::atomic<uint64_t> written;
    alignas(64) std::atomic<uint64_t> read;
    alignas(64) std::atomic<uint32_t> reader_sleeps;
    alignas(64) std::atomic<uint32_t> writer_sleeps;
};
constexpr int64_t DATA = 4096;
static_assert(sizeof(Ring) <= DATA, "the counters have a page of their own");

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

long futex(const std::atomic<uint64_t>& word, int what, uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, (const uint32_t*)&word, what, value, timeout, nullptr, 0);
}

// Until `counter` is not `seen` any more; false after `timeout_ns`.
bool wait_for(const std::atomic<uint64_t>& counter, uint64_t seen, std::atomic<uint32_t>& sleeps,
              int64_t spin_ns, int64_t timeout_ns) {
    const int64_t began = now_ns();
    while (counter.load(std::memory_order_acquire) == seen) {
        const int64_t passed = now_ns() - began;
        if (passed < spin_ns) {
            for (int i = 0; i < 32; ++i) __builtin_ia32_pause();
            continue;
        }
        if (passed >= timeout_ns) return false;
        sleeps.store(1);
        if (counter.load() == seen) {
            const int64_t left = timeout_ns - passed;
            const timespec limit = {(time_t)(left / 1000000000), (long)(left % 1000000000)};
            futex(counter, FUTEX_WAIT, (uint32_t)seen, &limit);
        }
        sleeps.store(0);
    }
    return true;
}

void wake(const std::atomic<uint64_t>& counter, std::atomic<uint32_t>& sleeps) {
    if (sleeps.load() && sleeps.exchange(0)) futex(counter, FUTEX_WAKE, 1, nullptr);
}

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace

#define MP_EXPORT extern "C" __attribute__((visibility("default")))

// Both move up to `count` bytes and return how many: fewer only if the other side did nothing for
// `timeout_ns`, -1 if its counter is wrong.
MP_EXPORT int64_t moonpool_ring_write(char* memory, int64_t capacity, const char* from,
                                      int64_t count, int64_t spin_ns, int64_t timeout_ns) {
    Ring& ring = *(Ring*)memory;
    int64_t done = 0;
    while (done < count) {
        const uint64_t written = ring.written.load(std::memory_order_relaxed);
        const uint64_t read = ring.read.load(std::memory_order_acquire);
        const uint64_t used = written - read;
        if (used > (uint64_t)capacity) return -1;
        const int64_t room = capacity - (int64_t)used;
        if (!room) {
            if (!wait_for(ring.read, read, ring.writer_sleeps, spin_ns, timeout_ns)) return done;
            continue;
        }
        const int64_t at = (int64_t)(written % (uint64_t)capacity);
        const int64_t size = least(least(room, count - done), capacity - at);
        memcpy(memory + DATA + at, from + done, size);
        ring.written.store(written + size);
        wake(ring.written, ring.reader_sleeps);
        done += size;
    }
    return done;
}

MP_EXPORT int64_t moonpool_ring_read(char* memory, int64_t capacity, char* to, int64_t count,
                                     int64_t spin_ns, int64_t timeout_ns) {
    Ring& ring = *(Ring*)memory;
    int64_t done = 0;
    while (done < count) {
        const uint64_t read = ring.read.load(std::memory_order_relaxed);
        const uint64_t written = ring.written.load(std::memory_order_acquire);
        const uint64_t there = written - read;
        if (there > (uint64_t)capacity) return -1;
        if (!there) {
            if (!wait_for(ring.written, written, ring.reader_sleeps, spin_ns, timeout_ns))
                return done;
            continue;
        }
        const int64_t at = (int64_t)(read % (uint64_t)capacity);
        const int64_t size = least(least((int64_t)there, count - done), capacity - at);
        memcpy(to + done, memory + DATA + at, size);
        ring.read.store(read + size);
        wake(ring.read, ring.writer_sleeps);
        done += size;
    }
    return done;
}

// The machine's own limit: `rounds` times one message of `size` bytes there and back, between two
// threads of whoever calls both sides. `side` 0 asks, 1 answers. Nanoseconds of a round.
MP_EXPORT double moonpool_ring_ping(char* there, char* back, int64_t capacity, int64_t size,
                                    int64_t rounds, int64_t spin_ns, int side) {
    char message[4096] = {};
    if (size > (int64_t)sizeof(message)) return -1;
    const int64_t began = now_ns(), patience = 2000000000ll;
    for (int64_t i = 0; i < rounds; ++i) {
        if (side == 0) {
            if (moonpool_ring_write(there, capacity, message, size, spin_ns, patience) != size)
                return -1;
            if (moonpool_ring_read(back, capacity, message, size, spin_ns, patience) != size)
                return -1;
        } else {
            if (moonpool_ring_read(there, capacity, message, size, spin_ns, patience) != size)
                return -1;
            if (moonpool_ring_write(back, capacity, message, size, spin_ns, patience) != size)
                return -1;
        }
    }
    return (double)(now_ns() - began) / rounds;
}
