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
#include "dense_product.h"
#include "graft.h"
#include "turned_product.h"

namespace graft {
namespace {

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

template <typename T>
void unpack_rows(T *out, const T *packed, const int64_t *ids, int64_t count, int64_t columns, int threads) {
    int64_t size = packed_columns<T>(columns) * kPanel;
    parallel((count + kPanel - 1) / kPanel, threads_for(count * columns, threads), [=](int64_t first, int64_t last) {
        for (int64_t start = first * kPanel; start < std::min(count, last * kPanel); start += kPanel) {
            int64_t rows = std::min<int64_t>(kPanel, count - start);
            if (rows == kPanel && is_panel(ids + start, rows)) {
                gather_panel(out + start * columns, packed + ids[start] / kPanel * size, columns);
                continue;
            }
            for (int64_t row = start; row < start + rows; row++)
                gather(out + row * columns, packed + ids[row] / kPanel * size, ids[row] % kPanel, columns);
        }
    });
}

// ---- the products

// Columns of W as they are packed.
template <typename T> struct Columns {
    const T *packed;
    int64_t rows, columns;  // of W

    // float32 [count][16], columns [start, start + count) of a panel; zeros beyond the last.
    const float *read(int64_t panel, int64_t start, int64_t count, float *scratch) const {
        const T *from = packed + (panel * packed_columns<T>(columns) + start) * kPanel;
        int64_t there = std::min(count, packed_columns<T>(columns) - start);
        if constexpr (sizeof(T) == 4) {
            if (there == count) return from;
            std::memcpy(scratch, from, size_t(there * kPanel) * sizeof(float));
        } else {
            for (int64_t k = 0; k < there; k += 2)
                for (int v = 0; v < kVectors; v++) {
                    UintVec pair;
                    std::memcpy(&pair, from + k * kPanel + v * kLanes * 2, sizeof pair);
                    store(scratch + k * kPanel + v * kLanes, (Vec)(pair << 16));
                    store(scratch + (k + 1) * kPanel + v * kLanes, (Vec)(pair & 0xffff0000u));
                }
        }
        std::memset(scratch + there * kPanel, 0, size_t((count - there) * kPanel) * sizeof(float));
        return scratch;
    }
};

template <typename T>
void linear(T *out, const T *x, const T *packed, const T *bias, int64_t rows, int64_t columns, int64_t depth,
            int64_t x_stride, int64_t out_stride, int threads) {
    Product<T> product{{out, bias, columns, out_stride}, packed, rows, columns, packed_columns<T>(depth)};
    std::vector<typename Work<T>::Type> scratch;
    const auto *readable_x = readable(scratch, x, rows, depth, product.depth, x_stride);
    multiply(product, readable_x, x_stride, threads);
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
GRAFT_RECORDABLE(graft_linear)

// out: [rows, depth] = y [rows, columns] @ W, W packed from [columns, depth].
GRAFT_API void graft_turned_linear(void *out, const void *y, const void *packed, int dtype, int64_t rows,
                                   int64_t columns, int64_t depth, int64_t y_stride, int64_t out_stride, int threads) {
    if (dtype == 0)
        multiply_turned(Columns<float>{(const float *)packed, columns, depth}, (float *)out, (const float *)y, rows,
                        y_stride, out_stride, threads);
    else
        multiply_turned(Columns<bf16>{(const bf16 *)packed, columns, depth}, (bf16 *)out, (const bf16 *)y, rows,
                        y_stride, out_stride, threads);
}
