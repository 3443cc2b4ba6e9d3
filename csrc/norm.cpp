#include "graft.h"
#include "parallel.h"
#include "simd.h"

namespace graft {
namespace {

// total += residual, rounded to their type.
template <typename T> void add_row(T *total, const T *residual, int64_t columns) {
    for (int64_t c = 0; c < columns; c += kLanes) {
        int count = int(std::min<int64_t>(columns - c, kLanes));
        store_some(total + c, load_some(total + c, count) + load_some(residual + c, count), count);
    }
}

template <typename T> void add(T *total, const T *residual, int64_t count, int threads) {
    parallel((count + kLanes - 1) / kLanes, threads_for(count, threads), [=](int64_t start, int64_t stop) {
        add_row(total + start * kLanes, residual + start * kLanes, std::min(stop * kLanes, count) - start * kLanes);
    });
}

template <typename T, typename W>
void rms_norm_row(T *out, const T *x, const W *weight, int64_t columns, float eps) {
    Vec squares{};
    for (int64_t c = 0; c < columns; c += kLanes) {
        Vec value = load_some(x + c, int(std::min<int64_t>(columns - c, kLanes)));
        squares += value * value;
    }
    float scale = 1.0f / __builtin_sqrtf(sum(squares) / float(columns) + eps);
    for (int64_t c = 0; c < columns; c += kLanes) {
        int count = int(std::min<int64_t>(columns - c, kLanes));
        Vec value = load_some(x + c, count) * scale;
        if (weight) {
            // A weight of x's own type is applied to the rounded norm, a float32 weight before rounding.
            if (sizeof(W) == sizeof(T)) value = rounded<T>(value);
            value *= load_some(weight + c, count);
        }
        store_some(out + c, value, count);
    }
}

template <typename T, typename W>
void rms_norm(T *out, const T *x, const W *weight, int64_t rows, int64_t parts, int64_t columns, int64_t x_stride,
              float eps, int threads) {
    parallel(rows, threads_for(rows * parts * columns * kNormWork, threads), [=](int64_t start, int64_t stop) {
        for (int64_t row = start; row < stop; row++)
            for (int64_t part = 0; part < parts; part++)
                rms_norm_row(out + (row * parts + part) * columns, x + row * x_stride + part * columns, weight,
                             columns, eps);
    });
}

template <typename T, typename W>
void add_rms_norm(T *out, T *total, const T *residual, const W *weight, int64_t rows, int64_t columns, float eps,
                  int threads) {
    parallel(rows, threads_for(rows * columns * kNormWork, threads), [=](int64_t start, int64_t stop) {
        for (int64_t at = start * columns; at < stop * columns; at += columns) {
            add_row(total + at, residual + at, columns);
            rms_norm_row(out + at, total + at, weight, columns, eps);
        }
    });
}

template <typename T>
void layer_norm_row(T *out, const T *x, const T *weight, const T *bias, int64_t columns, float eps) {
    Vec total{};
    for (int64_t c = 0; c < columns; c += kLanes)
        total += load_some(x + c, int(std::min<int64_t>(columns - c, kLanes)));
    float mean = sum(total) / float(columns);
    Vec squares{};
    for (int64_t c = 0; c < columns; c += kLanes) {
        int count = int(std::min<int64_t>(columns - c, kLanes));
        Vec centred = load_some(x + c, count) - mean;
        if (count < kLanes)
            for (int lane = count; lane < kLanes; lane++) centred[lane] = 0.0f;
        squares += centred * centred;
    }
    float scale = 1.0f / __builtin_sqrtf(sum(squares) / float(columns) + eps);
    for (int64_t c = 0; c < columns; c += kLanes) {
        int count = int(std::min<int64_t>(columns - c, kLanes));
        Vec value = (load_some(x + c, count) - mean) * scale;
        if (weight) value *= load_some(weight + c, count);
        if (bias) value += load_some(bias + c, count);
        store_some(out + c, value, count);
    }
}

template <typename T>
void layer_norm(T *out, const T *x, const T *weight, const T *bias, int64_t rows, int64_t columns, float eps,
                int threads) {
    parallel(rows, threads_for(rows * columns * kNormWork, threads), [=](int64_t start, int64_t stop) {
        for (int64_t row = start; row < stop; row++)
            layer_norm_row(out + row * columns, x + row * columns, weight, bias, columns, eps);
    });
}

template <typename T>
void add_layer_norm(T *out, T *total, const T *residual, const T *weight, const T *bias, int64_t rows,
                    int64_t columns, float eps, int threads) {
    parallel(rows, threads_for(rows * columns * kNormWork, threads), [=](int64_t start, int64_t stop) {
        for (int64_t at = start * columns; at < stop * columns; at += columns) {
            add_row(total + at, residual + at, columns);
            layer_norm_row(out + at, total + at, weight, bias, columns, eps);
        }
    });
}

}  // namespace
}  // namespace graft

using namespace graft;

// total += residual. total, residual: [count].
GRAFT_API void graft_add(void *total, const void *residual, int dtype, int64_t count, int threads) {
    if (dtype == 0)
        add((float *)total, (const float *)residual, count, threads);
    else
        add((bf16 *)total, (const bf16 *)residual, count, threads);
}
GRAFT_RECORDABLE(graft_add)

// columns [0, columns) of out [rows, out_stride] = x. x: [rows, columns], of `item` bytes each.
GRAFT_API void graft_copy_columns(void *out, const void *x, int item, int64_t rows, int64_t columns, int64_t x_stride,
                                  int64_t out_stride, int threads) {
    graft::parallel(rows, graft::threads_for(rows * columns, threads), [=](int64_t start, int64_t stop) {
        for (int64_t row = start; row < stop; row++)
            std::memcpy((char *)out + row * out_stride * item, (const char *)x + row * x_stride * item,
                        size_t(columns * item));
    });
}
GRAFT_RECORDABLE(graft_copy_columns)

// out, x: [rows, parts, columns], of which each part is normed by itself; x_stride from row to row of x. weight:
// [columns] in `weight_dtype`, or null.
GRAFT_API void graft_rms_norm(void *out, const void *x, const void *weight, int dtype, int weight_dtype, int64_t rows,
                              int64_t parts, int64_t columns, int64_t x_stride, float eps, int threads) {
    if (dtype == 0)
        rms_norm((float *)out, (const float *)x, (const float *)weight, rows, parts, columns, x_stride, eps, threads);
    else if (weight_dtype == 0)
        rms_norm((bf16 *)out, (const bf16 *)x, (const float *)weight, rows, parts, columns, x_stride, eps, threads);
    else
        rms_norm((bf16 *)out, (const bf16 *)x, (const bf16 *)weight, rows, parts, columns, x_stride, eps, threads);
}
GRAFT_RECORDABLE(graft_rms_norm)

// The same of total + residual, which `total` becomes.
GRAFT_API void graft_add_rms_norm(void *out, void *total, const void *residual, const void *weight, int dtype,
                                  int weight_dtype, int64_t rows, int64_t columns, float eps, int threads) {
    if (dtype == 0)
        add_rms_norm((float *)out, (float *)total, (const float *)residual, (const float *)weight, rows, columns, eps,
                     threads);
    else if (weight_dtype == 0)
        add_rms_norm((bf16 *)out, (bf16 *)total, (const bf16 *)residual, (const float *)weight, rows, columns, eps,
                     threads);
    else
        add_rms_norm((bf16 *)out, (bf16 *)total, (const bf16 *)residual, (const bf16 *)weight, rows, columns, eps,
                     threads);
}
GRAFT_RECORDABLE(graft_add_rms_norm)

// out, x: [rows, columns]. weight, bias: [columns] of the same dtype, or null.
GRAFT_API void graft_layer_norm(void *out, const void *x, const void *weight, const void *bias, int dtype,
                                int64_t rows, int64_t columns, float eps, int threads) {
    if (dtype == 0)
        layer_norm((float *)out, (const float *)x, (const float *)weight, (const float *)bias, rows, columns, eps,
                   threads);
    else
        layer_norm((bf16 *)out, (const bf16 *)x, (const bf16 *)weight, (const bf16 *)bias, rows, columns, eps,
                   threads);
}
GRAFT_RECORDABLE(graft_layer_norm)

// The same of total + residual, which `total` becomes.
GRAFT_API void graft_add_layer_norm(void *out, void *total, const void *residual, const void *weight, const void *bias,
                                    int dtype, int64_t rows, int64_t columns, float eps, int threads) {
    if (dtype == 0)
        add_layer_norm((float *)out, (float *)total, (const float *)residual, (const float *)weight,
                       (const float *)bias, rows, columns, eps, threads);
    else
        add_layer_norm((bf16 *)out, (bf16 *)total, (const bf16 *)residual, (const bf16 *)weight, (const bf16 *)bias,
                       rows, columns, eps, threads);
}
GRAFT_RECORDABLE(graft_add_layer_norm)
