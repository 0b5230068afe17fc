// y = x @ weight.T + bias with weights of 4 to 8 bits in groups, each row's bits its own.
//
// A weight is (number - offset) * scale + minimum, with a scale per sub-group of 16 or 32 numbers. A
// row of x is 16-bit whole numbers, with a scale per GROUP of them (rounded.h). Sums within a
// sub-group are whole numbers, so exact in any order. Sub-groups are added in rising order, then
// the groups, each as a multiplication and an addition. Hence every instruction set, tile and thread
// count gives the same bits, those of moonpool_engine/engine/quantized/linear.py.
//
// A panel is, for each 32 of `in`, a record of 32 outputs: words [WORDS][32] of numbers, then
// scales [32], then minimums [32]. With whole scales the panel has, before each 8 records, the
// float16 scales [32] and minimums [32] that they multiply.
//
// In a word an output has 8 numbers of 4 bits: 4w + b and 16 + 4w + b of the record in the low and
// the high half of byte b of word w. The fifth bits are one further word, the fifth and sixth two.
// Numbers of 8 bits take 8 words, 4w + b in byte b. Lane 2w + h of a row holds its numbers 4w + h
// and 4w + h + 2, and meets the weights of the same two. Where there are dot products of bytes, lanes
// 2w and 2w + 1 hold the high and the low bytes of 4w to 4w + 3, and meet the weights of all four.
#include "quantized.h"
#include "quantized_row.h"

namespace moonpool {
namespace {

template <class F, int ROWS>
void add_record(vf (&group)[ROWS][2], const Tile& t, int64_t block, const char* record,
                const vf (&scale_of)[2], const vf (&minimum_of)[2], int64_t column) {
    const int32_t* lanes = t.lanes + block * LANES * ROWS;
    const int32_t* both_sums = t.sums + block * 2 * ROWS;
    for (int s = 0; s < F::SUBS; ++s) {
        int32_t from[ROWS], x[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            x[r] = F::SUBS == 2 ? both_sums[s * ROWS + r] : both_sums[r] + both_sums[ROWS + r];
            from[r] = -t.offset * x[r];
        }
        vi whole[ROWS][2];
        const char* words = record + column * 4;
        if constexpr (F::SUBS == 1)
            record_sums<F::BITS, 0, LANES, ROWS>(whole, from, lanes, words);
        else if (s == 0)
            record_sums<F::BITS, 0, LANES / 2, ROWS>(whole, from, lanes, words);
        else
            record_sums<F::BITS, LANES / 2, LANES, ROWS>(whole, from, lanes, words);
        vf scale[2], minimum[2];
        const char* scales = record + F::NUMBERS + (s * PANEL + column) * F::SCALE;
        read_scales<F::SCALES, 2>(scale, scales, scale_of);
        if (F::MINIMUM)
            read_scales<F::SCALES, 2>(minimum, scales + F::SUBS * PANEL * F::SCALE, minimum_of);
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; ++r) {
            for (int v = 0; v < 2; ++v) {
                group[r][v] = add(group[r][v], mul(to_float(whole[r][v]), scale[v]));
                if (F::MINIMUM)
                    group[r][v] = add(group[r][v], mul(set1((float)x[r]), minimum[v]));
            }
        }
    }
}

// 2 vectors of outputs, from `column` of the panel on, for all rows of a tile: to [ROWS][2 * W].
template <class F, int ROWS>
void tile(const Tile& t, const char* panel, int64_t column, float* to, const char* ahead,
          bool fetches) {
    vf sums[ROWS][2];
    for (int r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = zero();
    for (int64_t first = 0; first < t.blocks; first += BLOCKS) {
        vf group[ROWS][2], scale_of[2] = {}, minimum_of[2] = {};
        for (int r = 0; r < ROWS; ++r) group[r][0] = group[r][1] = zero();
        for (int v = 0; v < 2 && F::SCALES == WHOLE; ++v) {
            scale_of[v] = load_f16(panel + 2 * (column + v * W));
            if (F::MINIMUM) minimum_of[v] = load_f16(panel + 2 * (PANEL + column + v * W));
        }
        panel += F::HEAD;
        const int64_t last = least(first + BLOCKS, t.blocks);
        for (int64_t block = first; block < last; ++block) {
            if (fetches) {
                for (int64_t at = 0; at < F::RECORD / HALVES; at += 64)
                    fetch(ahead + at);
                ahead += F::RECORD / HALVES;
            }
            add_record<F, ROWS>(group, t, block, panel, scale_of, minimum_of, column);
            panel += F::RECORD;
        }
        const float* scales = t.scales + first / BLOCKS * ROWS;
        for (int r = 0; r < ROWS; ++r) {
            for (int v = 0; v < 2; ++v)
                sums[r][v] = add(sums[r][v], mul(group[r][v], set1(scales[r])));
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        store(to + r * 2 * W, sums[r][0]);
        store(to + r * 2 * W + W, sums[r][1]);
    }
}

typedef void (*TileFn)(const Tile&, const char*, int64_t, float*, const char*, bool);
typedef void (*RowFn)(const Tile&, const char*, float*, const char*, bool);

template <class F, int ROWS = MAX_ROWS>
TileFn tile_for(int rows) {
    if constexpr (ROWS == 0)
        __builtin_trap();
    else
        return rows == ROWS ? tile<F, ROWS> : tile_for<F, ROWS - 1>(rows);
}

// What all forms are asked. y is [rows][stride], of which `out` columns are written.
template <class L>
struct QuantizedCall {
    typedef typename L::T T;
    const T* x;
    const char* weight;
    const float* bias;  // padded to whole panels, or null
    T* y;
    int64_t rows, in, out, stride;
    int32_t offset;
    TileFn (*tile_fn)(int) = nullptr;
    RowFn row_fn = nullptr;  // of a row alone, if there is one
    bool row_bytes = false;  // whether it takes high and low bytes of x
    int64_t one_panel_bytes = 0;

    int64_t blocks() const { return in / BLOCK; }
    int64_t tile_lanes() const { return blocks() * (LANES + 2) + ceil_div(in, GROUP); }
    int64_t panel_bytes() const { return one_panel_bytes; }
    int64_t ahead_step() const { return 1; }
    const char* panels() const { return weight; }

    void pack_rows(int64_t first, int n, int32_t* packed) const {
        alignas(64) int16_t group[GROUP + W] = {};
        int32_t* sums = packed + blocks() * LANES * n;
        float* scales = (float*)(sums + blocks() * 2 * n);
        for (int r = 0; r < n; ++r) {
            for (int64_t from = 0; from < in; from += GROUP) {
                const int64_t count = least(GROUP, in - from);
                scales[from / GROUP * n + r] = narrow<L>(x + (first + r) * in + from, count, group);
                for (int64_t k = 0; k < count; k += 4) {
                    int32_t* to = packed + (from + k) / 2 * n + r;
                    if (n == 1 && row_bytes) split_bytes(group + k, to, to + 1);
                    else pack_four(group + k, to, to + n);
                }
                for (int64_t k = 0; k < count; k += 16) {
                    int32_t sum = 0;
                    for (int i = 0; i < 16; ++i) sum += group[k + i];
                    sums[(from + k) / 16 * n + r] = sum;
                }
            }
        }
    }

    void tile(int n, const int32_t* a, int64_t row, int64_t panel, const char* ahead,
              int64_t step) const {
        const int32_t* sums = a + blocks() * LANES * n;
        const Tile t = {a, sums, (const float*)(sums + blocks() * 2 * n), blocks(), offset};
        alignas(64) float to[MAX_ROWS * PANEL];
        if (n == 1 && row_fn) {
            row_fn(t, weight + panel * one_panel_bytes, to, ahead, step != 0);
            for (int h = 0; h < HALVES; ++h) put(to + h * 2 * W, row, panel * PANEL + h * 2 * W);
            return;
        }
        for (int h = 0; h < HALVES; ++h) {
            tile_fn(n)(t, weight + panel * one_panel_bytes, h * 2 * W, to, ahead, step != 0);
            ahead += one_panel_bytes / HALVES;
            for (int r = 0; r < n; ++r) put(to + r * 2 * W, row + r, panel * PANEL + h * 2 * W);
        }
    }

    void put(const float* from, int64_t row, int64_t column) const {
        for (int64_t at = column; at < least(column + 2 * W, out); at += W) {
            vf sum = load(from + at - column);
            if (bias) sum = add(sum, load(bias + at));
            store_first<L>(y + row * stride + at, sum, (int)least(out - at, W));
        }
    }
};

template <class L, class F>
void run_form(QuantizedCall<L> call, int threads) {
    call.tile_fn = tile_for<F>;
#if defined(MP_ROW_TILES)
    call.row_fn = row_tile<F>;
    call.row_bytes = F::BITS == 4;
#endif
    call.one_panel_bytes = F::panel_bytes(call.blocks());
    run(call, threads);
}

// Returns 1 for an unknown form.
template <class L>
int linear(int form, QuantizedCall<L> call, int threads) {
    switch (form) {
        case 0: run_form<L, Form<4, 32, HALF, false>>(call, threads); return 0;
        case 1: run_form<L, Form<4, 32, HALF, true>>(call, threads); return 0;
        case 2: run_form<L, Form<4, 32, WIDE, true>>(call, threads); return 0;
        case 3: run_form<L, Form<4, 32, WHOLE, true>>(call, threads); return 0;
        case 4: run_form<L, Form<5, 32, HALF, false>>(call, threads); return 0;
        case 5: run_form<L, Form<5, 32, HALF, true>>(call, threads); return 0;
        case 6: run_form<L, Form<5, 32, WHOLE, true>>(call, threads); return 0;
        case 7: run_form<L, Form<6, 16, WHOLE, false>>(call, threads); return 0;
        case 8: run_form<L, Form<8, 32, HALF, false>>(call, threads); return 0;
        case 9: run_form<L, Form<5, 32, WIDE, false>>(call, threads); return 0;
        case 10: run_form<L, Form<8, 32, WHOLE, false>>(call, threads); return 0;
    }
    return 1;
}

}  // namespace
}  // namespace moonpool

MP_EXPORT(moonpool_linear_quantized_f32)(int form, const void* x, const void* weight,
                                         const float* bias, void* y, int64_t rows, int64_t in,
                                         int64_t out, int64_t stride, int offset, int threads) {
    return moonpool::linear<moonpool::F32>(
        form, {(const float*)x, (const char*)weight, bias, (float*)y, rows, in, out, stride, offset},
        threads);
}

MP_EXPORT(moonpool_linear_quantized_b16)(int form, const void* x, const void* weight,
                                         const float* bias, void* y, int64_t rows, int64_t in,
                                         int64_t out, int64_t stride, int offset, int threads) {
    return moonpool::linear<moonpool::B16>(
        form,
        {(const uint16_t*)x, (const char*)weight, bias, (uint16_t*)y, rows, in, out, stride, offset},
        threads);
}
