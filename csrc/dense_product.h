// The product of rows with panels, wherever the panels lie and whatever becomes of the sums.
#pragma once

#include "panels.h"

namespace graft {

constexpr int64_t kRowBlock = 256;  // rows of x that stay in the second-level cache

// What all tiles of a call have in common. T is the type of the panels; output.finish takes each sum.
template <typename T, typename Out = Output<T>> struct Product {
    Out output;
    const T *packed;
    int64_t rows, columns, depth;  // y is [rows, columns], depth is K as packed
};

// R rows by P panels. X is the type the rows of x are read as.
template <int R, int P, typename T, typename Out, typename X>
void tile(const Product<T, Out> &product, const X *x, int64_t x_stride, int64_t row, int64_t panel) {
    constexpr int kStep = sizeof(T) == 2 ? 2 : 1;
    Vec total[P][R][kVectors] = {};
    int64_t size = product.depth * kPanel;
    const T *panels = product.packed + panel * size;
    for (int64_t k = 0; k < product.depth; k += kStep)
        for (int p = 0; p < P; p++) multiply(total[p], panels + p * size + k * kPanel, x + row * x_stride + k, x_stride);
    for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++)
            for (int v = 0; v < kVectors; v++)
                product.output.finish(row + r, (panel + p) * kPanel + v * kLanes, total[p][r][v]);
}

// As many panels beside each other as the registers hold for R rows.
template <int R, typename T, typename Out, typename X>
void panels(const Product<T, Out> &product, const X *x, int64_t x_stride, int64_t row, int64_t start, int64_t stop) {
    constexpr int kAccumulators = kLanes == 16 ? 24 : 12;
    constexpr int kWanted = kAccumulators / (R * kVectors);
    constexpr int P = kWanted > 4 ? 4 : kWanted > 0 ? kWanted : 1;
    int64_t panel = start;
    for (; panel + P <= stop; panel += P) tile<R, P>(product, x, x_stride, row, panel);
    for (; panel < stop; panel++) tile<R, 1>(product, x, x_stride, row, panel);
}

template <typename T, typename Out, typename X>
void multiply_rows(const Product<T, Out> &product, const X *x, int64_t x_stride, int threads) {
    constexpr int kRows = kLanes == 16 ? 8 : kLanes == 8 ? 4 : 2;
    int64_t count = (product.columns + kPanel - 1) / kPanel;
    int64_t work = product.rows * product.columns * product.depth;
    // A few panels stay in the first-level cache while all rows of a block pass over them.
    constexpr int64_t kGroup = 4;
    parallel((count + kGroup - 1) / kGroup, threads_for(work, threads), [&](int64_t first, int64_t last) {
        for (int64_t block = 0; block < product.rows; block += kRowBlock) {
            int64_t block_stop = std::min(product.rows, block + kRowBlock);
            for (int64_t group = first; group < last; group++) {
                int64_t start = group * kGroup, stop = std::min(count, start + kGroup);
                int64_t row = block;
                for (; row + kRows <= block_stop; row += kRows) panels<kRows>(product, x, x_stride, row, start, stop);
                for (; row + 4 <= block_stop; row += 4) panels<4>(product, x, x_stride, row, start, stop);
                for (; row + 2 <= block_stop; row += 2) panels<2>(product, x, x_stride, row, start, stop);
                for (; row < block_stop; row++) panels<1>(product, x, x_stride, row, start, stop);
            }
        }
    });
}

#if defined(__AMX_BF16__)
template <typename Out>
void finish_tile(const Product<bf16, Out> &product, const float *sums, int64_t row, int rows, int64_t panel) {
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < kVectors; v++)
            product.output.finish(row + r, panel * kPanel + v * kLanes, load(sums + r * kPanel + v * kLanes));
}

// Up to 32 rows by up to two panels.
template <typename Out>
void multiply_tiles(const Product<bf16, Out> &product, const bf16 *x, int64_t x_stride, int64_t row, int upper, int lower,
                    int64_t panel, bool two) {
    const bf16 *first = product.packed + panel * product.depth * kPanel;
    const bf16 *second = first + product.depth * kPanel;
    const bf16 *top = x + row * x_stride, *bottom = top + 16 * x_stride;
    sum_tiles(top, bottom, x_stride * 2, first, second, product.depth, two, lower > 0);
    alignas(64) float sums[16 * kPanel];
    _tile_stored(0, sums, 64);
    finish_tile(product, sums, row, upper, panel);
    if (two) {
        _tile_stored(1, sums, 64);
        finish_tile(product, sums, row, upper, panel + 1);
    }
    if (lower) {
        _tile_stored(2, sums, 64);
        finish_tile(product, sums, row + 16, lower, panel);
        if (two) {
            _tile_stored(3, sums, 64);
            finish_tile(product, sums, row + 16, lower, panel + 1);
        }
    }
}

// Rows of x that are multiplied by all panels before the next ones are: what fits the second-level cache beside some
// panels, since every block of rows reads all panels again.
inline int64_t tile_block(int64_t rows, int64_t depth) {
    constexpr int64_t kBlockBytes = 5 << 18;
    int64_t most = std::max(kRowBlock, kBlockBytes / (std::max<int64_t>(depth, kDepth) * int64_t(sizeof(bf16))));
    int64_t blocks = std::max<int64_t>(1, (rows + most - 1) / most);
    return round_up((rows + blocks - 1) / blocks, 32);
}

template <typename Out>
void multiply_in_tiles(const Product<bf16, Out> &product, const bf16 *x, int64_t x_stride, int threads) {
    int64_t count = (product.columns + kPanel - 1) / kPanel;
    int64_t work = product.rows * product.columns * product.depth;
    int64_t block_rows = tile_block(product.rows, product.depth);
    parallel((count + 1) / 2, threads_for(work, threads), [&](int64_t first, int64_t last) {
        int configured = -1;
        for (int64_t block = 0; block < product.rows; block += block_rows) {
            int64_t block_stop = std::min(product.rows, block + block_rows);
            for (int64_t pair = first; pair < last; pair++)
                for (int64_t row = block; row < block_stop; row += 32) {
                    int height = int(std::min<int64_t>(32, block_stop - row));
                    int upper = std::min(height, 16), lower = height - upper;
                    if (height != configured) configure(upper, lower);
                    configured = height;
                    multiply_tiles(product, x, x_stride, row, upper, lower, pair * 2, pair * 2 + 1 < count);
                }
        }
        _tile_release();
    });
}
#endif

// All rows by all panels, as fast as this level can. x: rows of at least `depth` columns, every `stride`.
template <typename T, typename Out>
void multiply(const Product<T, Out> &product, const typename Work<T>::Type *x, int64_t stride, int threads) {
#if defined(__AMX_BF16__)
    if constexpr (sizeof(T) == 2)
        multiply_in_tiles(product, x, stride, threads);
    else
#endif
        multiply_rows(product, x, stride, threads);
}

}  // namespace graft
