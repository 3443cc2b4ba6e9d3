// Low-rank updates of many adapters at once, each over its own rows.
#include <type_traits>
#include <vector>

#include "graft.h"
#include "lora.h"
#include "lora_tiles.h"
#include "parallel.h"
#include "simd.h"

namespace graft {

namespace {

constexpr int64_t kRows = 8;       // of a work item
constexpr int64_t kRanks = 64;     // of a work item of the first product
constexpr int64_t kColumns = 256;  // of a work item of the second
constexpr int kRowTile = 4;
constexpr int kVectorTile = 4;

// use(c, total) with total[r][v] = sum over k of x[r][k] * matrix[k][c + v], for R rows and V vectors of columns. Where
// columns are few a sum is made of several, over every second or fourth k: additions wait for the one before. How many
// does not depend on the rows, so a row's sum is its own.
template <int R, int V, typename M, typename Use>
void tile(const float *x, int64_t x_stride, const M *matrix, int64_t stride, int64_t depth, int64_t column,
          const Use &use) {
    constexpr int S = kVectorTile / V;
    Vec total[S][R][V] = {};
    auto add = [&](int s, int64_t k) {
        for (int v = 0; v < V; v++) {
            Vec part = load(matrix + k * stride + column + v * kLanes);
            for (int r = 0; r < R; r++) total[s][r][v] += part * x[r * x_stride + k];
        }
    };
    int64_t k = 0;
    for (; k + S <= depth; k += S)
        for (int s = 0; s < S; s++) add(s, k + s);
    for (; k < depth; k++) add(0, k);
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            for (int s = 1; s < S; s++) total[0][r][v] += total[s][r][v];
            use(r, column + v * kLanes, int(kLanes), total[0][r][v]);
        }
}

// The same for all columns.
template <int R, typename M, typename Use>
void product(const float *x, int64_t x_stride, const M *matrix, int64_t stride, int64_t depth, int64_t columns,
             const Use &use) {
    int64_t column = 0;
    for (; columns - column >= kVectorTile * kLanes; column += kVectorTile * kLanes)
        tile<R, kVectorTile>(x, x_stride, matrix, stride, depth, column, use);
    for (; columns - column >= 2 * kLanes; column += 2 * kLanes)
        tile<R, 2>(x, x_stride, matrix, stride, depth, column, use);
    for (; columns - column >= kLanes; column += kLanes) tile<R, 1>(x, x_stride, matrix, stride, depth, column, use);
    if (column == columns) return;
    int count = int(columns - column);
    Vec total[R] = {};
    for (int64_t k = 0; k < depth; k++) {
        Vec part = load_some(matrix + k * stride + column, count);
        for (int r = 0; r < R; r++) total[r] += part * x[r * x_stride + k];
    }
    for (int r = 0; r < R; r++) use(r, column, count, total[r]);
}

// Rows [row, row + rows) of one segment: `columns` ranks of the first product, or outputs of the second.
struct Item {
    const Update *update;
    int64_t row, rows;
    float *shrunk;  // of the first of these rows, [rows, rank]
    int64_t column, columns;
};

template <typename M, int R> void shrink_rows(const Item &item, const float *x, int64_t depth, int64_t r) {
    const Update &update = *item.update;
    float *to = item.shrunk + r * update.rank + item.column;
    product<R>(x + r * depth, depth, (const M *)update.shrink + item.column, update.stride, depth, item.columns,
               [=](int row, int64_t column, int count, Vec total) {
                   store_some(to + row * item.update->rank + column, total, count);
               });
}

template <typename M, int R, typename O>
void expand_rows(const Item &item, O *out, int64_t out_stride, int64_t r) {
    const Update &update = *item.update;
    for (int64_t e = 0; e < update.num_expands; e++) {
        const Expand &expand = update.expands()[e];
        int64_t start = std::max(item.column, expand.out_start);
        int64_t stop = std::min(item.column + item.columns, expand.out_stop);
        if (start >= stop) continue;
        O *to = out + (item.row + r) * out_stride + start;
        product<R>(item.shrunk + r * update.rank + expand.rank_start, update.rank,
                   (const M *)expand.matrix + start - expand.out_start, expand.stride,
                   expand.rank_stop - expand.rank_start, stop - start,
                   [=](int row, int64_t column, int count, Vec total) {
                       O *at = to + row * out_stride + column;
                       store_some(at, load_some(at, count) + total, count);
                   });
    }
}

// x as float32 rows next to each other.
template <typename X>
const float *widened(std::vector<float> &scratch, const Item &item, const X *x, int64_t x_stride, int64_t depth) {
    scratch.resize(size_t(item.rows * depth));
    for (int64_t r = 0; r < item.rows; r++)
        for (int64_t k = 0; k < depth; k += kLanes) {
            int count = int(std::min<int64_t>(depth - k, kLanes));
            store_some(scratch.data() + r * depth + k, load_some(x + (item.row + r) * x_stride + k, count), count);
        }
    return scratch.data();
}

template <typename M, typename X>
void shrink(std::vector<float> &scratch, const Item &item, const X *x, int64_t x_stride, int64_t depth) {
    const float *wide = widened(scratch, item, x, x_stride, depth);
    int64_t r = 0;
    for (; r + kRowTile <= item.rows; r += kRowTile) shrink_rows<M, kRowTile>(item, wide, depth, r);
    for (; r < item.rows; r++) shrink_rows<M, 1>(item, wide, depth, r);
}

template <typename M, typename O> void expand(const Item &item, O *out, int64_t out_stride) {
    int64_t r = 0;
    for (; r + kRowTile <= item.rows; r += kRowTile) expand_rows<M, kRowTile>(item, out, out_stride, r);
    for (; r < item.rows; r++) expand_rows<M, 1>(item, out, out_stride, r);
}

#if defined(__AMX_BF16__)
typedef TiledUpdates Tiles;
#else
// There are none.
struct Tiles {
    static bool takes(const Segment &) { return false; }
    Tiles(int64_t, int64_t) {}
    void add(const Segment &) {}
    bool empty() const { return true; }
    template <typename O> void compute(O *, const bf16 *, int64_t, int64_t) {}
};
#endif

template <typename O, typename X>
void lora(O *out, const X *x, const Segment *segments, int64_t num_segments, int64_t depth, int64_t width,
          int64_t x_stride, int64_t out_stride, bool by_row, int threads) {
    constexpr bool kHasTiles = std::is_same<X, bf16>::value;
    Tiles tiles(depth, width);
    int64_t size = 0, work = 0;
    for (int64_t s = 0; s < num_segments; s++) {
        if (!segments[s].update) continue;
        int64_t ranks = (segments[s].stop - segments[s].start) * segments[s].update->rank;
        size += ranks;
        work += ranks * (depth + width);
    }
    std::vector<float> scratch((size_t(size)));
    std::vector<Item> shrinks, expands;
    float *shrunk = scratch.data();
    for (int64_t s = 0; s < num_segments; s++) {
        const Update *update = segments[s].update;
        if (!update) continue;
        if (kHasTiles && !by_row && Tiles::takes(segments[s])) {
            tiles.add(segments[s]);
            continue;
        }
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
        std::vector<float> wide;
#pragma omp for schedule(static)
        for (size_t index = 0; index < shrinks.size(); index++) {
            const Item &item = shrinks[index];
            if (item.update->dtype == 0)
                shrink<float>(wide, item, x, x_stride, depth);
            else
                shrink<bf16>(wide, item, x, x_stride, depth);
        }
#pragma omp for schedule(static) nowait
        for (size_t index = 0; index < expands.size(); index++) {
            const Item &item = expands[index];
            if (item.update->dtype == 0)
                expand<float>(item, out, out_stride);
            else
                expand<bf16>(item, out, out_stride);
        }
        if constexpr (kHasTiles)
            if (!tiles.empty()) tiles.compute(out, x, x_stride, out_stride);
    }
}

}  // namespace
}  // namespace graft

using namespace graft;

// out [T, width] += (x [T, depth] @ shrink) @ matrix for every expand of every segment. Sums are float32; each element
// is rounded once per expand, together with what was there. Segments are disjoint; two expands of an update add to the
// same columns, or to none in common. by_row: whether a row gets the same bits in a segment of any length.
GRAFT_API void graft_lora(void *out, const void *x, const void *segments, int64_t num_segments, int out_dtype,
                          int x_dtype, int64_t depth, int64_t width, int64_t x_stride, int64_t out_stride,
                          int by_row, int threads) {
    auto *list = (const Segment *)segments;
    if (out_dtype == 0 && x_dtype == 0)
        lora((float *)out, (const float *)x, list, num_segments, depth, width, x_stride, out_stride, by_row != 0, threads);
    else if (out_dtype == 0)
        lora((float *)out, (const bf16 *)x, list, num_segments, depth, width, x_stride, out_stride, by_row != 0, threads);
    else if (x_dtype == 0)
        lora((bf16 *)out, (const float *)x, list, num_segments, depth, width, x_stride, out_stride, by_row != 0, threads);
    else
        lora((bf16 *)out, (const bf16 *)x, list, num_segments, depth, width, x_stride, out_stride, by_row != 0, threads);
}
GRAFT_RECORDABLE(graft_lora)
