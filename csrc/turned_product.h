// out = y W for a W that lies in panels of 16 of its rows, in whatever form: the gradient of x in x W^T.
//
// A few columns of W at a time become panels of W^T, in the second-level cache, and are multiplied as panels of W are.
// Sums are in float32, over the rows of W in one order: a row's result does not depend on its neighbours.
#pragma once

#include "dense_product.h"
#include "transpose.h"

namespace graft {

constexpr int64_t kTurnedPanels = 4;   // of 16 columns, made together
constexpr int64_t kTurnedRows = 2048;  // of W in them

// 16 rows of a panel of W^T. to: float32 [16][16], bfloat16 [8][16][2]. from: [16 columns of W][16 rows of W].
inline void store_turned(float *to, int row, int v, const Vec (&rows)[kLanes]) {
    for (int index = 0; index < kLanes; index++) store(to + (row + index) * kPanel + v * kLanes, rows[index]);
}

inline void store_turned(bf16 *to, int row, int v, const Vec (&rows)[kLanes]) {
    for (int index = 0; index < kLanes; index += 2) {
        UintVec pair = rounded_bits(rows[index]) | rounded_bits(rows[index + 1]) << 16;
        std::memcpy(to + ((row + index) / 2 * kPanel + v * kLanes) * 2, &pair, sizeof pair);
    }
}

template <typename T> void turn(T *to, const float *from) {
    for (int v = 0; v < kVectors; v++)
        for (int row = 0; row < kPanel; row += kLanes) {
            Vec rows[kLanes];
            for (int column = 0; column < kLanes; column++)
                rows[column] = load(from + (v * kLanes + column) * kPanel + row);
            transpose(rows);
            store_turned(to, row, v, rows);
        }
}

// Adds sums to those that are there.
struct Sums {
    float *sums;
    int64_t stride;

    void finish(int64_t row, int64_t column, Vec total) const {
        float *to = sums + row * stride + column;
        store(to, load(to) + total);
    }
};

// source: `rows` and `columns` of W; read(panel, start, count, scratch), float32 [count][16], those columns of a panel of
// W, with zeros beyond the last, perhaps in `scratch`. y: [rows, source.rows].
template <typename T, typename Source>
void multiply_turned(const Source &source, T *out, const T *y, int64_t rows, int64_t y_stride, int64_t out_stride,
                     int threads) {
    constexpr int64_t kWidth = kTurnedPanels * kPanel;
    constexpr int64_t kPadding = sizeof(T) == 2 ? kDepth : kPanel;
    int64_t depth = round_up(source.rows, kPadding);
    std::vector<typename Work<T>::Type> readable_y;
    const auto *x = readable<T>(readable_y, y, rows, source.rows, depth, y_stride);
    parallel((source.columns + kWidth - 1) / kWidth, threads_for(rows * source.rows * source.columns, threads),
             [&](int64_t first, int64_t last) {
        int64_t height = round_up(std::min(depth, kTurnedRows), kDepth);
        Lines<T> panels(size_t(kWidth * height));
        Lines<float> sums(size_t(rows * kWidth)), scratch(kWidth * kPanel);
        for (int64_t group = first; group < last; group++) {
            int64_t column = group * kWidth;
            std::fill_n(sums.data(), sums.size(), 0.0f);
            for (int64_t start = 0; start < depth; start += kTurnedRows) {
                int64_t stop = std::min(depth, start + kTurnedRows), size = (stop - start) * kPanel;
                for (int64_t row = start; row < stop; row += kPanel) {
                    T *to = panels.data() + (row - start) * kPanel;
                    if (row >= source.rows) {
                        for (int p = 0; p < kTurnedPanels; p++) std::memset(to + p * size, 0, kPanel * kPanel * sizeof(T));
                        continue;
                    }
                    const float *from = source.read(row / kPanel, column, kWidth, scratch.data());
                    for (int p = 0; p < kTurnedPanels; p++) turn(to + p * size, from + p * kPanel * kPanel);
                }
                Product<T, Sums> product{{sums.data(), kWidth}, panels.data(), rows, kWidth, stop - start};
                multiply(product, x + start, y_stride, 1);
            }
            for (int64_t row = 0; row < rows; row++)
                for (int64_t k = 0; k < std::min(kWidth, source.columns - column); k += kLanes)
                    store_some(out + row * out_stride + column + k, load(sums.data() + row * kWidth + k),
                               int(std::min<int64_t>(kLanes, source.columns - column - k)));
        }
    });
}

}  // namespace graft
