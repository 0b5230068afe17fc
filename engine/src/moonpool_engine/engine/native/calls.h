// What attention and the store of K and V are asked, as moonpool_engine/engine/native/library.py packs it.
#pragma once
#include <stdint.h>

namespace moonpool {

struct AttendCall {
    const char* q;
    char* out;
    const char* blocks;  // of this layer: slice of block b at b * block_bytes
    const int32_t* positions;
    const int32_t* row_starts;
    const int32_t* block_tables;
    const float* sinks;  // [heads]: a score that takes weight but has no value; null: none
    int64_t block_bytes, num_blocks, table_width, sequences;
    int64_t heads, kv_heads, head_dim, block_tokens;
    int64_t window;  // tokens that a row sees, its own included; 0: all
    int64_t latent;  // the last elements of a key that are its value too (MLA); 0: V is apart
    int64_t fp8;     // 1: blocks hold e4m3, then a power of two for each token and head (fp8.h)
    float scale;
    float soft_cap;  // scores become soft_cap * tanh(score / soft_cap); 0: they stay
};

// Which part of the contexts is walked, and what becomes of it. A state is STATE + 2 * head_dim
// floats per row and head, a partial is head_dim + 2: highest, sum, and the output times the sum.
constexpr int STATE = 32;

struct Part {
    const int32_t* begins = nullptr;  // of each sequence: its first token, a multiple of SPAN
    const int32_t* ends = nullptr;    // and the one after its last
    const float* from = nullptr;      // states to go on from
    float* to = nullptr;              // states to leave, or
    float* partials = nullptr;        // sums of the parts; else what was attended goes to `out`
};

struct PartCall {
    AttendCall call;
    Part part;
};

struct StoreCall {
    const char* kv;  // [rows][2 * kv_heads][head_dim], of latents [rows][kv_heads][head_dim]
    char* blocks;    // of this layer: slice of block b at b * block_bytes
    const int32_t* positions;
    const int32_t* row_starts;
    const int32_t* block_tables;
    int64_t block_bytes, num_blocks, table_width, sequences;
    int64_t kv_heads, head_dim, block_tokens;
    int64_t latent;  // not 0: keys are values too, and there is no V
    int64_t fp8;     // 1: see fp8.h
};

// Before a state of linear attention: floats, the first of which is the number of its tokens.
constexpr int DELTA_HEAD = 16;

struct DeltaCall {
    const char* x;      // [rows][width]: q, k, v, z, b, a
    char* out;          // [rows][value_heads * value_dim]
    char* blocks;       // of this layer: slice of block b at b * block_bytes
    const int32_t* positions;
    const int32_t* row_starts;
    const int32_t* block_tables;
    const float* tap_weights;  // [taps][channels], the newest row's last
    const float* decay;        // [value_heads]
    const float* step_bias;    // [value_heads]
    const float* norm;         // [value_dim]
    const uint8_t* unchecked;  // [sequences]: 1 where blocks may hold anything; null: nowhere
    int64_t block_bytes, num_blocks, table_width, sequences;
    int64_t key_heads, value_heads, key_dim, value_dim, taps, block_tokens;
    int64_t tiled;      // 1: value head h has key head h % key_heads
    float eps;
};

}  // namespace moonpool
