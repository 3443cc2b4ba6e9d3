// What a call of attention is about, and what all ways to compute it have in common.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace graft {

// new tokens [row, row + query_len) are the last of `total_len`; `table` begins at block `first_block`.
struct Sequence {
    int64_t row, query_len, total_len, first_block;
    const int64_t *table;
};

// How scores are made; see AttentionScores. slope_dtype: where slope times position is rounded.
struct Scores {
    float scale, softcap, slope_factor;
    int32_t slope_dtype;
    const float *slopes, *sinks;  // [heads], or null
};

struct Shape {
    int64_t heads, kv_heads, head_dim, block_size, window;  // window: 0 for none
    int64_t query_row_stride, query_head_stride;
};

// Keys that are taken together. They begin at multiples of as many.
constexpr int64_t kTile = 64;

template <typename T> struct Cache {
    const T *keys, *values;
    const Shape &shape;
    const Sequence &sequence;
    int64_t kv_head;

    // Where the keys and values of positions [first, stop) are.
    void find(const T **key_rows, const T **value_rows, int64_t first, int64_t stop) const {
        int64_t step = shape.kv_heads * shape.head_dim;
        int64_t block = first / shape.block_size, inside = first % shape.block_size;
        for (int64_t position = first; position < stop; block++, inside = 0) {
            int64_t slot = sequence.table[block - sequence.first_block] * shape.block_size + inside;
            int64_t offset = slot * step + kv_head * shape.head_dim;
            for (; inside < shape.block_size && position < stop; inside++, position++, offset += step) {
                *key_rows++ = keys + offset;
                *value_rows++ = values + offset;
            }
        }
    }
};

inline int64_t oldest_seen(int64_t position, int64_t window) {
    return window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0;
}

template <typename T> Vec alibi(const Scores &scores, Vec slope, Vec position) {
    Vec bias = position * slope;
    if (scores.slope_dtype == 1) bias = rounded<bf16>(bias);
    bias = rounded<T>(bias);
    return rounded<T>(bias * scores.slope_factor);
}

inline Vec capped(const Scores &scores, Vec score) {
    score *= scores.scale;
    return scores.softcap > 0.0f ? tanh(score / scores.softcap) * scores.softcap : score;
}

inline Vec lane_numbers() {
    Vec lanes;
    for (int lane = 0; lane < kLanes; lane++) lanes[lane] = float(lane);
    return lanes;
}

}  // namespace graft
