// Arranges stored rows of quantized weights in the panels that linear_quantized.cpp describes.
//
// native/quantized.py has the same arrangement in torch, for all formats, and gives the same bytes.
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int PANEL = 32, BLOCK = 32;
enum Kind { Q4_0 = 0, Q8_0 = 1, Q4_K = 2, Q5_K = 3, Q6_K = 4, KINDS = 5 };

struct Format {
    int group, bytes, bits, subs;  // subs: scales per block of 32
    bool minimum;
};
constexpr Format FORMATS[KINDS] = {
    {32, 18, 4, 1, false}, {32, 34, 8, 1, false}, {256, 144, 4, 1, true},
    {256, 176, 5, 1, true}, {256, 210, 6, 2, false},
};

// One stored group in parts; scale and minimum are bits of float16.
struct Decoded {
    uint8_t numbers[256];
    uint16_t scale, minimum;
    int8_t scales[16], minimums[8];
};

void six_bit_scales(const uint8_t* s, Decoded& d) {
    for (int i = 0; i < 4; ++i) {
        d.scales[i] = s[i] & 63;
        d.minimums[i] = s[4 + i] & 63;
        d.scales[4 + i] = (s[8 + i] & 15) | ((s[i] >> 6) << 4);
        d.minimums[4 + i] = (s[8 + i] >> 4) | ((s[4 + i] >> 6) << 4);
    }
}

void decode(Kind kind, const uint8_t* g, Decoded& d) {
    switch (kind) {
        case Q4_0:
            std::memcpy(&d.scale, g, 2);
            for (int i = 0; i < 16; ++i) {
                d.numbers[i] = g[2 + i] & 15;
                d.numbers[16 + i] = g[2 + i] >> 4;
            }
            return;
        case Q8_0:
            std::memcpy(&d.scale, g, 2);
            for (int i = 0; i < 32; ++i) d.numbers[i] = g[2 + i] ^ 128;
            return;
        case Q4_K:
        case Q5_K: {
            std::memcpy(&d.scale, g, 2);
            std::memcpy(&d.minimum, g + 2, 2);
            d.minimum ^= 0x8000;  // it is subtracted
            six_bit_scales(g + 4, d);
            const uint8_t* fifth = g + 16;
            const uint8_t* low = g + (kind == Q4_K ? 16 : 48);
            for (int c = 0; c < 4; ++c)
                for (int i = 0; i < 32; ++i) {
                    d.numbers[64 * c + i] = low[32 * c + i] & 15;
                    d.numbers[64 * c + 32 + i] = low[32 * c + i] >> 4;
                }
            if (kind == Q5_K)
                for (int s = 0; s < 8; ++s)
                    for (int i = 0; i < 32; ++i)
                        d.numbers[32 * s + i] |= ((fifth[i] >> s) & 1) << 4;
            return;
        }
        default:
            std::memcpy(&d.scale, g + 208, 2);
            std::memcpy(d.scales, g + 192, 16);
            for (int h = 0; h < 2; ++h) {
                const uint8_t *low = g + 64 * h, *high = g + 128 + 32 * h;
                uint8_t* out = d.numbers + 128 * h;
                for (int i = 0; i < 32; ++i) {
                    out[i] = (low[i] & 15) | ((high[i] & 3) << 4);
                    out[32 + i] = (low[32 + i] & 15) | (((high[i] >> 2) & 3) << 4);
                    out[64 + i] = (low[i] >> 4) | (((high[i] >> 4) & 3) << 4);
                    out[96 + i] = (low[32 + i] >> 4) | ((high[i] >> 6) << 4);
                }
            }
    }
}

uint32_t load(const uint8_t* from) {
    uint32_t word;
    std::memcpy(&word, from, 4);
    return word;
}

// The words of one output's 32 numbers, each word 32 outputs after the one before.
void put_words(const uint8_t* n, int bits, uint32_t* to) {
    if (bits == 8) {
        for (int w = 0; w < 8; ++w) to[w * PANEL] = load(n + 4 * w);
        return;
    }
    constexpr uint32_t LOW = 0x0f0f0f0f, LANE = 0x00ff00ff;
    for (int w = 0; w < 4; ++w)
        to[w * PANEL] = (load(n + 4 * w) & LOW) | ((load(n + 16 + 4 * w) & LOW) << 4);
    if (bits == 4) return;
    // Four numbers are two lanes: the first and the third, the second and the fourth.
    const int step = bits - 4, each = 8 / step;  // pairs of lanes of one word
    for (int w = 0; w < step; ++w) {
        uint32_t word = 0;
        for (int i = 0; i < each; ++i) {
            const uint32_t high = (load(n + 4 * (w * each + i)) >> 4) & LOW;
            word |= ((high & LANE) | ((high >> 8 & LANE) << step)) << (2 * step * i);
        }
        to[(4 + w) * PANEL] = word;
    }
}

struct Job {
    Kind kind;
    const uint8_t* data;
    uint8_t* panels;
    int64_t out, groups, panel_bytes;

    void panel(int64_t p) const {
        const Format f = FORMATS[kind];
        const std::vector<uint8_t> zeros(f.bytes, 0);
        const bool whole = f.group == 256;
        const int words = f.bits == 8 ? 8 : f.bits, blocks = f.group / BLOCK;
        const int64_t each = whole ? 1 : 2;  // bytes of a scale of a record
        const int64_t record = (words * 4 + f.subs * each * (f.minimum ? 2 : 1)) * PANEL;
        const int64_t head = whole ? PANEL * (f.minimum ? 4 : 2) : 0;
        uint8_t* at = panels + p * panel_bytes;
        Decoded d;
        for (int64_t g = 0; g < groups; ++g, at += head + blocks * record)
            for (int o = 0; o < PANEL; ++o) {
                const int64_t row = p * PANEL + o;
                decode(kind, row < out ? data + (row * groups + g) * f.bytes : zeros.data(), d);
                if (whole) {
                    std::memcpy(at + 2 * o, &d.scale, 2);
                    if (f.minimum) std::memcpy(at + 2 * (PANEL + o), &d.minimum, 2);
                }
                for (int b = 0; b < blocks; ++b) {
                    uint8_t* to = at + head + b * record;
                    put_words(d.numbers + b * BLOCK, f.bits, (uint32_t*)to + o);
                    to += words * 4 * PANEL;
                    if (!whole) {
                        std::memcpy(to + 2 * o, &d.scale, 2);
                        continue;
                    }
                    for (int s = 0; s < f.subs; ++s) to[s * PANEL + o] = d.scales[b * f.subs + s];
                    if (f.minimum) to[f.subs * PANEL + o] = d.minimums[b];
                }
            }
    }
};

}  // namespace

// data: [out][groups] stored groups. panels: [ceil(out / 32)][panel_bytes]. Returns 0, or 1 for an
// unknown kind.
extern "C" __attribute__((visibility("default"))) int moonpool_repack(
    int kind, const void* data, void* panels, int64_t out, int64_t groups, int64_t panel_bytes,
    int threads) {
    if (kind < 0 || kind >= KINDS) return 1;
    const Job job{(Kind)kind, (const uint8_t*)data, (uint8_t*)panels, out, groups, panel_bytes};
    const int64_t count = (out + PANEL - 1) / PANEL;
    auto share = [&](int64_t first) {
        for (int64_t p = first; p < count; p += threads) job.panel(p);
    };
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t) others.emplace_back(share, t);
    share(0);
    for (auto& other : others) other.join();
    return 0;
}
