// An attention worker's part of a step, from ring to ring without an interpreter: takes Q, attends
// what is old, takes K and V, stores them, attends the rest, answers.
//
// Steps come ready made (moonpool_engine/engine/native/attention_executor.py); all other messages are for whoever calls.
#include "calls.h"
#include "ring.h"

using namespace moonpool;

namespace {

constexpr int Q = 2, KEYS_VALUES = 3, ATTENDED = 4, ECHO = 6;  // moonpool_engine/attention_offload/wire.py has the same
enum Phase { HEAD, BODY, ANSWER };
enum Result { WAITED = 0, OTHER = 1, REFUSED = 2, BROKEN = -1 };

struct Step {
    int64_t number;
    int64_t stores, whole, parts;  // rows of each
    int64_t early;                 // attends as far as it can before K and V are there
    int64_t layer;                 // whose Q is here
    int64_t q_bytes, kv_bytes, answer_bytes, row_bytes;
    char *q, *kv, *answer, *part_q;
    const int64_t* part_rows;  // the row of Q of each part
    StoreCall store;
    PartCall all, before, after, segments;  // of layer 0
};

// What a layer's attention has besides the causal mask (AttendCall).
struct LayerRule {
    const float* sinks;
    int64_t window;
    float soft_cap;
};

struct Hand {
    char *in, *out;
    int64_t capacity;
    Waiter* waiter;
    int (*store)(const StoreCall*, int);
    int (*attend)(const PartCall*, int);
    int64_t threads, layer_bytes, num_layers;
    Step* steps;
    int64_t num_steps;
    char* echo;
    int64_t echo_bytes;
    const LayerRule* rules;  // [num_layers]; null: none has any
    // What is under way.
    int64_t phase, done, busy_ns;
    Piece body;
    Step* step;
    Header header;
};

int call_attend(const Hand& h, PartCall call, int64_t layer) {
    call.call.blocks += layer * h.layer_bytes;
    if (h.rules) {
        const LayerRule& rule = h.rules[layer];
        call.call.sinks = rule.sinks;
        call.call.window = rule.window;
        call.call.soft_cap = rule.soft_cap;
    }
    return h.attend(&call, (int)h.threads);
}

// Where the body of a message goes; false if it is none of ours.
bool expect(Hand& h) {
    const Header& head = h.header;
    if (head.kind == ECHO) {
        h.body = {h.echo, head.num_bytes};
        return head.num_bytes <= h.echo_bytes;
    }
    if ((head.kind != Q && head.kind != KEYS_VALUES) || head.layer >= h.num_layers) return false;
    for (h.step = h.steps; h.step < h.steps + h.num_steps; ++h.step) {
        Step& step = *h.step;
        if (step.number != head.step) continue;
        if (head.kind == Q) h.body = {step.q, step.q_bytes};
        else h.body = {step.kv, step.kv_bytes};
        return h.body.size == head.num_bytes && (head.kind == Q || step.layer == head.layer);
    }
    return false;
}

int take_queries(Hand& h) {
    Step& step = *h.step;
    step.layer = h.header.layer;
    h.busy_ns = 0;
    if (!step.early || !step.whole) return 0;
    const int64_t began = now_ns();
    const int refused = call_attend(h, step.before, step.layer);
    h.busy_ns = now_ns() - began;
    return refused;
}

int attend(Hand& h) {
    Step& step = *h.step;
    const int64_t began = now_ns(), layer = step.layer;
    if (step.stores) {
        StoreCall call = step.store;
        call.blocks += layer * h.layer_bytes;
        if (h.store(&call, (int)h.threads)) return 1;
    }
    if (step.whole && call_attend(h, step.early ? step.after : step.all, layer)) return 1;
    for (int64_t i = 0; i < step.parts; ++i)
        memcpy(step.part_q + i * step.row_bytes, step.q + step.part_rows[i] * step.row_bytes,
               step.row_bytes);
    if (step.parts && call_attend(h, step.segments, layer)) return 1;
    step.layer = -1;
    h.busy_ns += now_ns() - began;
    h.body = {step.answer, step.answer_bytes};
    h.header.kind = ATTENDED;
    h.header.num_bytes = (uint32_t)step.answer_bytes;
    h.header.busy_ns = (uint32_t)least(h.busy_ns, UINT32_MAX);
    return 0;
}

}  // namespace

MP_PLAIN int64_t moonpool_hand_size(int what) { return what ? sizeof(Step) : sizeof(Hand); }

// Serves until nothing was moved for `timeout_ns` (0), until a message comes that is for the caller,
// its head in `header` and its body unread (1), or until a kernel refuses a step (2). -1: the ring
// makes no sense. Called again, it goes on.
MP_PLAIN int64_t moonpool_hand_serve(Hand* hand, int64_t timeout_ns) {
    Hand& h = *hand;
    Waiter& waiter = *h.waiter;
    const Piece head = {(char*)&h.header, sizeof(Header)}, none = {nullptr, 0};
    for (;;) {
        const int64_t before = h.done;
        if (h.phase == HEAD) {
            h.done = ring_read(h.in, h.capacity, none, head, before, waiter, timeout_ns);
            if (h.done < 0) return BROKEN;
            if (h.done < head.size) return WAITED;
            h.done = 0;
            if (!expect(h)) return OTHER;
            h.phase = BODY;
        } else if (h.phase == BODY) {
            h.done = ring_read(h.in, h.capacity, none, h.body, before, waiter, timeout_ns);
            if (h.done < 0) return BROKEN;
            if (h.done < h.body.size) return WAITED;
            h.done = 0;
            h.phase = h.header.kind == Q ? HEAD : ANSWER;
            if (h.header.kind == Q && take_queries(h)) return REFUSED;
            if (h.header.kind == KEYS_VALUES && attend(h)) return REFUSED;
        } else {
            h.done = ring_write(h.out, h.capacity, head, h.body, before, waiter, timeout_ns);
            if (h.done < 0) return BROKEN;
            if (h.done < head.size + h.body.size) return WAITED;
            h.done = 0;
            h.phase = HEAD;
        }
    }
}
