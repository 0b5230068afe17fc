// What each rank of an instance has, to all of them, through memory that all have mapped.
//
// A rank has a counter and two buffers: it writes a piece into one of them, counts it, waits until
// all others have counted theirs, and copies those. Whoever has counted piece k has copied all of
// piece k - 1, so the buffer of k - 1 is free for k + 1, and nobody waits twice.
#include "ring.h"

using namespace moonpool;

namespace {

constexpr int64_t LOOK_AGAIN_NS = 50000000;  // asleep, whether the others are still there

struct Seat {
    alignas(64) std::atomic<uint64_t> count;
    alignas(64) std::atomic<uint32_t> sleepers;  // who wait for `count`
};

// At the beginning of the memory; the buffers follow from DATA on, two of each rank.
struct Meeting {
    std::atomic<uint32_t> ended;
    Seat seats[16];
};
static_assert(sizeof(Meeting) <= DATA, "the counters have a page of their own");

// Until this rank has counted more than `seen` pieces; false after `timeout_ns`, or if it is over.
bool come(Meeting& meeting, Seat& seat, uint64_t seen, Waiter& waiter, int64_t timeout_ns) {
    const int64_t began = now_ns();
    if (looks(seat.count, seen, waiter, began, timeout_ns)) return true;
    bool here = false;
    seat.sleepers.fetch_add(1);
    while (!(here = seat.count.load() != seen)) {
        const int64_t left = timeout_ns - (now_ns() - began);
        if (left <= 0 || meeting.ended.load()) break;
        const timespec limit = {0, (long)least(left, LOOK_AGAIN_NS)};
        futex(seat.count, FUTEX_WAIT, (uint32_t)seen, &limit);
    }
    seat.sleepers.fetch_sub(1);
    return here;
}

}  // namespace

MP_PLAIN int64_t moonpool_meeting_size(int64_t num_ranks, int64_t buffer_bytes) {
    const int64_t most = (int64_t)(sizeof(Meeting::seats) / sizeof(Seat));
    return num_ranks <= most ? DATA + 2 * num_ranks * buffer_bytes : 0;
}

// `out`: room for `size` bytes of each of the first `senders` ranks, in their order. All ranks make
// the same calls with the same sizes. Returns 0, or 1 if a rank did not come.
MP_PLAIN int64_t moonpool_meet(char* memory, int64_t buffer_bytes, int64_t rank, int64_t num_ranks,
                               int64_t senders, const char* mine, char* out, int64_t size,
                               Waiter* waiter, int64_t timeout_ns) {
    Meeting& meeting = *(Meeting*)memory;
    if (meeting.ended.load()) return 1;
    int64_t done = 0;
    do {
        const int64_t part = least(size - done, buffer_bytes);
        const uint64_t seen = meeting.seats[rank].count.load(std::memory_order_relaxed);
        char* const buffers = memory + DATA + (int64_t)(seen % 2) * num_ranks * buffer_bytes;
        if (rank < senders) memcpy(buffers + rank * buffer_bytes, mine + done, part);
        meeting.seats[rank].count.store(seen + 1);
        if (meeting.seats[rank].sleepers.load())
            futex(meeting.seats[rank].count, FUTEX_WAKE, INT32_MAX, nullptr);
        char* const own = out + rank * size + done;
        if (rank < senders && own != mine + done) memcpy(own, mine + done, part);
        for (int64_t i = 1; i < num_ranks; ++i) {
            const int64_t other = (rank + i) % num_ranks;
            if (!come(meeting, meeting.seats[other], seen, *waiter, timeout_ns)) {
                meeting.ended.store(1);  // the counts do not fit any more
                return 1;
            }
            if (other < senders)
                memcpy(out + other * size + done, buffers + other * buffer_bytes, part);
        }
        done += part;
    } while (done < size);
    return 0;
}

// Whoever waits, or comes later, gives up.
MP_PLAIN void moonpool_meeting_end(char* memory) { ((Meeting*)memory)->ended.store(1); }
