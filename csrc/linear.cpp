// y = x W^T + b for weights packed in panels.
//
// A panel is 16 rows of W side by side, so that one vector holds a column of them and no sum runs across lanes:
//   float32   [N / 16][K][16]
//   bfloat16  [N / 16][K / 2][16][2], K padded to a multiple of 32 with zeros
// N is padded to a multiple of 16 with zeros. The bfloat16 layout is what both the dot product instruction and the
// tile multiplication want, and reads as two float32 vectors by a shift and a mask where there is neither.
//
// Every element of y is summed over k in one order, whatever the number of rows: a row's result does not depend on its
// neighbours.
#include "graft.h"
#include "panels.h"

namespace graft {
namespace {

constexpr int64_t kRowBlock = 256;         // rows of x that stay in the second-level cache

// ---- packing

void pack_panel(float *to, const float *weight, int64_t rows, int64_t columns) {
    for (int64_t k = 0; k < columns; k++)
        for (int64_t n = 0; n < kPanel; n++) to[k * kPanel + n] = n < rows ? weight[n * columns + k] : 0.0f;
}

void pack_panel(bf16 *to, const bf16 *weight, int64_t rows, int64_t columns) {
    for (int64_t k = 0; k < round_up(columns, kDepth); k++)
        for (int64_t n = 0; n < kPanel; n++)
            to[(k / 2 * kPanel + n) * 2 + k % 2] =
                n < rows && k < columns ? weight[n * columns + k] : bf16{0};
}

template <typename T> int64_t packed_columns(int64_t columns) {
    return sizeof(T) == 2 ? round_up(columns, kDepth) : columns;
}

template <typename T> void pack(T *packed, const T *weight, int64_t rows, int64_t columns, int threads) {
    int64_t size = packed_columns<T>(columns) * kPanel;
    parallel((rows + kPanel - 1) / kPanel, threads, [=](int64_t start, int64_t stop) {
        for (int64_t panel = start; panel < stop; panel++)
            pack_panel(packed + panel * size, weight + panel * kPanel * columns,
                       std::min<int64_t>(kPanel, rows - panel * kPanel), columns);
    });
}

void gather(float *to, const float *panel, int64_t lane, int64_t columns) {
    for (int64_t k = 0; k < columns; k++) to[k] = panel[k * kPanel + lane];
}

void gather(bf16 *to, const bf16 *panel, int64_t lane, int64_t columns) {
    for (int64_t k = 0; k < columns; k++) to[k] = panel[(k / 2 * kPanel + lane) * 2 + k % 2];
}

// All rows of a panel: one pass over it.
void gather_panel(float *to, const float *panel, int64_t columns) {
    for (int64_t k = 0; k < columns; k++)
        for (int64_t n = 0; n < kPanel; n++) to[n * columns + k] = panel[k * kPanel + n];
}

void gather_panel(bf16 *to, const bf16 *panel, int64_t columns) {
    for (int64_t k = 0; k + 1 < columns; k += 2)
        for (int64_t n = 0; n < kPanel; n++)
            std::memcpy(to + n * columns + k, panel + (k / 2 * kPanel + n) * 2, 2 * sizeof(bf16));
    if (columns % 2)
        for (int64_t n = 0; n < kPanel; n++)
            to[n * columns + columns - 1] = panel[(columns / 2 * kPanel + n) * 2];
}

bool is_panel(const int64_t *ids) {
    for (int64_t n = 0; n < kPanel; n++)
        if (ids[n] != ids[0] + n) return false;
    return ids[0] % kPanel == 0;
}

template <typename T>
void unpack_rows(T *out, const T *packed, const int64_t *ids, int64_t count, int64_t columns, int threads) {
    int64_t size = packed_columns<T>(columns) * kPanel;
    parallel((count + kPanel - 1) / kPanel, threads_for(count * columns, threads), [=](int64_t first, int64_t last) {
        for (int64_t start = first * kPanel; start < std::min(count, last * kPanel); start += kPanel) {
            int64_t rows = std::min<int64_t>(kPanel, count - start);
            if (rows == kPanel && is_panel(ids + start)) {
                gather_panel(out + start * columns, packed + ids[start] / kPanel * size, columns);
                continue;
            }
            for (int64_t row = start; row < start + rows; row++)
                gather(out + row * columns, packed + ids[row] / kPanel * size, ids[row] % kPanel, columns);
        }
    });
}

// ---- the product

// What all tiles of a call have in common. T is the type of x and y as the caller has them.
template <typename T> struct Product {
    Output<T> output;
    const T *packed;
    int64_t rows, columns, depth;  // y is [rows, columns], depth is K as packed
};

// R rows by P panels. X is the type the rows of x are read as.
template <int R, int P, typename T, typename X>
void tile(const Product<T> &product, const X *x, int64_t x_stride, int64_t row, int64_t panel) {
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
template <int R, typename T, typename X>
void panels(const Product<T> &product, const X *x, int64_t x_stride, int64_t row, int64_t start, int64_t stop) {
    constexpr int kAccumulators = kLanes == 16 ? 24 : 12;
    constexpr int kWanted = kAccumulators / (R * kVectors);
    constexpr int P = kWanted > 4 ? 4 : kWanted > 0 ? kWanted : 1;
    int64_t panel = start;
    for (; panel + P <= stop; panel += P) tile<R, P>(product, x, x_stride, row, panel);
    for (; panel < stop; panel++) tile<R, 1>(product, x, x_stride, row, panel);
}

template <typename T, typename X>
void multiply_rows(const Product<T> &product, const X *x, int64_t x_stride, int threads) {
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
void finish_tile(const Product<bf16> &product, const float *sums, int64_t row, int rows, int64_t panel) {
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < kVectors; v++)
            product.output.finish(row + r, panel * kPanel + v * kLanes, load(sums + r * kPanel + v * kLanes));
}

// Up to 32 rows by up to two panels.
void multiply_tiles(const Product<bf16> &product, const bf16 *x, int64_t x_stride, int64_t row, int upper, int lower,
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

void multiply_in_tiles(const Product<bf16> &product, const bf16 *x, int64_t x_stride, int threads) {
    int64_t count = (product.columns + kPanel - 1) / kPanel;
    int64_t work = product.rows * product.columns * product.depth;
    parallel((count + 1) / 2, threads_for(work, threads), [&](int64_t first, int64_t last) {
        int configured = -1;
        for (int64_t block = 0; block < product.rows; block += kRowBlock) {
            int64_t block_stop = std::min(product.rows, block + kRowBlock);
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

void linear(const Product<float> &product, const float *x, int64_t columns, int64_t stride, int threads) {
    (void)columns;
    multiply_rows(product, x, stride, threads);
}

void linear(const Product<bf16> &product, const bf16 *x, int64_t columns, int64_t stride, int threads) {
#if defined(__AVX512BF16__)
    std::vector<bf16> scratch;
    if (columns != product.depth) {
        x = prepared(scratch, x, product.rows, columns, product.depth, stride);
        stride = product.depth;
    }
#if defined(__AMX_BF16__)
    multiply_in_tiles(product, x, stride, threads);
#else
    multiply_rows(product, x, stride, threads);
#endif
#else
    std::vector<float> scratch;
    const float *wide = prepared(scratch, x, product.rows, columns, product.depth, stride);
    multiply_rows(product, wide, product.depth, threads);
#endif
}

template <typename T>
void linear(T *out, const T *x, const T *packed, const T *bias, int64_t rows, int64_t columns, int64_t depth,
            int64_t x_stride, int64_t out_stride, int threads) {
    Product<T> product{{out, bias, columns, out_stride}, packed, rows, columns, packed_columns<T>(depth)};
    linear(product, x, depth, x_stride, threads);
}

}  // namespace
}  // namespace graft

using namespace graft;

// Elements that a packed [rows, columns] matrix takes.
GRAFT_API int64_t graft_packed_size(int dtype, int64_t rows, int64_t columns) {
    int64_t depth = dtype == 0 ? packed_columns<float>(columns) : packed_columns<bf16>(columns);
    return round_up(rows, kPanel) * depth;
}

// weight: [rows, columns].
GRAFT_API void graft_pack(void *packed, const void *weight, int dtype, int64_t rows, int64_t columns, int threads) {
    if (dtype == 0)
        pack((float *)packed, (const float *)weight, rows, columns, threads);
    else
        pack((bf16 *)packed, (const bf16 *)weight, rows, columns, threads);
}

// out: [count, columns], rows `ids` of the matrix that was packed.
GRAFT_API void graft_unpack_rows(void *out, const void *packed, const int64_t *ids, int dtype, int64_t count,
                                 int64_t columns, int threads) {
    if (dtype == 0)
        unpack_rows((float *)out, (const float *)packed, ids, count, columns, threads);
    else
        unpack_rows((bf16 *)out, (const bf16 *)packed, ids, count, columns, threads);
}

// out: [rows, columns] = x [rows, depth] @ W^T + bias, W packed from [columns, depth].
GRAFT_API void graft_linear(void *out, const void *x, const void *packed, const void *bias, int dtype, int64_t rows,
                            int64_t columns, int64_t depth, int64_t x_stride, int64_t out_stride, int threads) {
    if (dtype == 0)
        linear((float *)out, (const float *)x, (const float *)packed, (const float *)bias, rows, columns, depth,
               x_stride, out_stride, threads);
    else
        linear((bf16 *)out, (const bf16 *)x, (const bf16 *)packed, (const bf16 *)bias, rows, columns, depth, x_stride,
               out_stride, threads);
}
