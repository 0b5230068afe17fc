// One end of a ring, for whoever calls; and what the machine can do at best.
#include "ring.h"

using namespace moonpool;

MP_PLAIN int64_t moonpool_ring_write(char* memory, int64_t capacity, char* head, int64_t head_size,
                                     char* body, int64_t body_size, int64_t done, Waiter* waiter,
                                     int64_t timeout_ns) {
    return ring_write(memory, capacity, {head, head_size}, {body, body_size}, done, *waiter,
                      timeout_ns);
}

MP_PLAIN int64_t moonpool_ring_read(char* memory, int64_t capacity, char* head, int64_t head_size,
                                    char* body, int64_t body_size, int64_t done, Waiter* waiter,
                                    int64_t timeout_ns) {
    return ring_read(memory, capacity, {head, head_size}, {body, body_size}, done, *waiter,
                     timeout_ns);
}

// `rounds` times one message there and back, asked from here without an interpreter. Nanoseconds of
// a round; -1 if the other side does not answer.
MP_PLAIN double moonpool_ring_ask(char* there, char* back, int64_t capacity, char* head, char* body,
                                  int64_t size, int64_t rounds, Waiter* waiter) {
    const int64_t began = now_ns(), patience = 2000000000ll, total = size + (int64_t)sizeof(Header);
    const Piece header = {head, sizeof(Header)}, message = {body, size};
    for (int64_t i = 0; i < rounds; ++i) {
        if (ring_write(there, capacity, header, message, 0, *waiter, patience) != total) return -1;
        if (ring_read(back, capacity, header, message, 0, *waiter, patience) != total) return -1;
    }
    return (double)(now_ns() - began) / rounds;
}

// The machine's own limit: a flag and the bytes of a message in memory that two threads share, with
// nothing else: no counters, no ring, no head. `spins`: looks again and again; else it sleeps on a
// futex at once and the other side wakes it. `side` 0 asks, 1 answers. Nanoseconds of a round, -1
// after two seconds without an answer.
MP_PLAIN double moonpool_bare_ping(char* memory, char* message, int64_t size, int64_t rounds,
                                   int spins, int side) {
    std::atomic<uint64_t>& mine = *(std::atomic<uint64_t>*)(memory + (side ? 64 : 0));
    std::atomic<uint64_t>& theirs = *(std::atomic<uint64_t>*)(memory + (side ? 0 : 64));
    char* out = memory + DATA + (side ? size : 0);
    const char* in = memory + DATA + (side ? 0 : size);
    const int64_t began = now_ns();
    for (int64_t i = 1; i <= rounds; ++i) {
        for (int half = 0; half < 2; ++half) {
            if (half == side) {
                memcpy(out, message, size);
                mine.store(i);
                if (!spins) futex(mine, FUTEX_WAKE, 1, nullptr);
                continue;
            }
            const int64_t asked = now_ns();
            for (int64_t looks = 1; theirs.load() != (uint64_t)i; ++looks) {
                const timespec limit = {0, 100000000};
                if (spins) relax();
                else futex(theirs, FUTEX_WAIT, (uint32_t)(i - 1), &limit);
                const bool due = !spins || looks % 1024 == 0;
                if (due && now_ns() - asked > 2000000000ll) return -1;
            }
            memcpy(message, in, size);
        }
    }
    return (double)(now_ns() - began) / rounds;
}
