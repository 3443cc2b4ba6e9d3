// Low-rank updates of many adapters at once, each over its own rows.
#include <vector>

#include "graft.h"
#include "parallel.h"
#include "simd.h"

namespace graft {

// Of one expand: columns [out_start, out_stop) get shrunk columns [rank_start, rank_stop) times `matrix`.
struct Expand {
    const void *matrix;  // [rank_stop - rank_start, out_stop - out_start]
    int64_t stride;
    int64_t out_start, out_stop, rank_start, rank_stop;
};

// Of one adapter. In memory: these fields, then `num_expands` of the above.
struct Update {
    const void *shrink;  // [in, rank]
    int64_t stride;
    int64_t rank;
    int64_t dtype;  // of all matrices
    int64_t num_expands;
    const Expand *expands() const { return reinterpret_cast<const Expand *>(this + 1); }
};

struct Segment {
    int64_t start, stop;
    const Update *update;
};

namespace {

constexpr int64_t kRows = 8;           // of a work item
constexpr int64_t kColumns = 256;      // of a work item of the second product
constexpr int64_t kRanks = 16;         // of a work item of the first product
constexpr int kRowTile = 4;

// total[r][c] = sum over k of x[r][k] * matrix[k][c], for R rows and up to one vector of columns.
template <int R, typename X, typename M>
void product(Vec (&total)[R], const X *x, int64_t x_stride, const M *matrix, int64_t stride, int64_t depth, int count) {
    if (count == kLanes) {
        for (int64_t k = 0; k < depth; k++) {
            Vec row = load(matrix + k * stride);
            for (int r = 0; r < R; r++) total[r] += row * widen(x[r * x_stride + k]);
        }
        return;
    }
    for (int64_t k = 0; k < depth; k++) {
        Vec row = load_some(matrix + k * stride, count);
        for (int r = 0; r < R; r++) total[r] += row * widen(x[r * x_stride + k]);
    }
}

// Rows [row, row + rows) of one segment: `columns` ranks of the first product, or outputs of the second.
struct Item {
    const Update *update;
    int64_t row, rows;
    float *shrunk;  // of the first of these rows, [rows, rank]
    int64_t column, columns;
};

template <typename M, int R, typename X>
void shrink_rows(const Item &item, const X *x, int64_t x_stride, int64_t depth, int64_t r) {
    const Update &update = *item.update;
    for (int64_t column = item.column; column < item.column + item.columns; column += kLanes) {
        int count = int(std::min<int64_t>(item.column + item.columns - column, kLanes));
        Vec total[R] = {};
        product(total, x + (item.row + r) * x_stride, x_stride, (const M *)update.shrink + column, update.stride,
                depth, count);
        for (int i = 0; i < R; i++) store_some(item.shrunk + (r + i) * update.rank + column, total[i], count);
    }
}

template <typename M, int R, typename O>
void expand_rows(const Item &item, O *out, int64_t out_stride, int64_t r) {
    const Update &update = *item.update;
    for (int64_t e = 0; e < update.num_expands; e++) {
        const Expand &expand = update.expands()[e];
        int64_t start = std::max(item.column, expand.out_start);
        int64_t stop = std::min(item.column + item.columns, expand.out_stop);
        for (int64_t column = start; column < stop; column += kLanes) {
            int count = int(std::min<int64_t>(stop - column, kLanes));
            Vec total[R] = {};
            product(total, item.shrunk + r * update.rank + expand.rank_start, update.rank,
                    (const M *)expand.matrix + column - expand.out_start, expand.stride,
                    expand.rank_stop - expand.rank_start, count);
            for (int i = 0; i < R; i++) {
                O *to = out + (item.row + r + i) * out_stride + column;
                store_some(to, load_some(to, count) + total[i], count);
            }
        }
    }
}

template <typename M, typename X>
void shrink(const Item &item, const X *x, int64_t x_stride, int64_t depth) {
    int64_t r = 0;
    for (; r + kRowTile <= item.rows; r += kRowTile) shrink_rows<M, kRowTile>(item, x, x_stride, depth, r);
    for (; r < item.rows; r++) shrink_rows<M, 1>(item, x, x_stride, depth, r);
}

template <typename M, typename O> void expand(const Item &item, O *out, int64_t out_stride) {
    int64_t r = 0;
    for (; r + kRowTile <= item.rows; r += kRowTile) expand_rows<M, kRowTile>(item, out, out_stride, r);
    for (; r < item.rows; r++) expand_rows<M, 1>(item, out, out_stride, r);
}

template <typename O, typename X>
void lora(O *out, const X *x, const Segment *segments, int64_t num_segments, int64_t depth, int64_t width,
          int64_t x_stride, int64_t out_stride, int threads) {
    int64_t size = 0, work = 0;
    for (int64_t s = 0; s < num_segments; s++) {
        int64_t ranks = (segments[s].stop - segments[s].start) * segments[s].update->rank;
        size += ranks;
        work += ranks * depth;
    }
    std::vector<float> scratch((size_t(size)));
    std::vector<Item> shrinks, expands;
    float *shrunk = scratch.data();
    for (int64_t s = 0; s < num_segments; s++) {
        const Update *update = segments[s].update;
        for (int64_t row = segments[s].start; row < segments[s].stop; row += kRows) {
            int64_t rows = std::min(kRows, segments[s].stop - row);
            for (int64_t column = 0; column < update->rank; column += kRanks)
                shrinks.push_back({update, row, rows, shrunk, column, std::min(kRanks, update->rank - column)});
            for (int64_t column = 0; column < width; column += kColumns)
                expands.push_back({update, row, rows, shrunk, column, std::min(kColumns, width - column)});
            shrunk += rows * update->rank;
        }
    }
    int team = threads_for(work, threads);
#pragma omp parallel num_threads(team) if (team > 1)
    {
#pragma omp for schedule(static)
        for (size_t index = 0; index < shrinks.size(); index++) {
            const Item &item = shrinks[index];
            if (item.update->dtype == 0)
                shrink<float>(item, x, x_stride, depth);
            else
                shrink<bf16>(item, x, x_stride, depth);
        }
#pragma omp for schedule(static)
        for (size_t index = 0; index < expands.size(); index++) {
            const Item &item = expands[index];
            if (item.update->dtype == 0)
                expand<float>(item, out, out_stride);
            else
                expand<bf16>(item, out, out_stride);
        }
    }
}

}  // namespace
}  // namespace graft

using namespace graft;

// out [T, width] += (x [T, depth] @ shrink) @ matrix for every expand of every segment. Sums are float32; each element
// is rounded once per expand, together with what was there. Segments are disjoint.
GRAFT_API void graft_lora(void *out, const void *x, const void *segments, int64_t num_segments, int out_dtype,
                          int x_dtype, int64_t depth, int64_t width, int64_t x_stride, int64_t out_stride,
                          int threads) {
    auto *list = (const Segment *)segments;
    if (out_dtype == 0 && x_dtype == 0)
        lora((float *)out, (const float *)x, list, num_segments, depth, width, x_stride, out_stride, threads);
    else if (out_dtype == 0)
        lora((float *)out, (const bf16 *)x, list, num_segments, depth, width, x_stride, out_stride, threads);
    else if (x_dtype == 0)
        lora((bf16 *)out, (const float *)x, list, num_segments, depth, width, x_stride, out_stride, threads);
    else
        lora((bf16 *)out, (const bf16 *)x, list, num_segments, depth, width, x_stride, out_stride, threads);
}
