#include "graft.h"
#include "parallel.h"
#include "simd.h"

namespace graft {
namespace {

enum Activation { kSilu = 0, kGeluTanh = 1, kRelu = 2 };

template <int A> Vec activated(Vec x) {
    if (A == kSilu) return x * sigmoid(x);
    if (A == kRelu) return select(x > splat(0.0f), x, select(x != x, x, splat(0.0f)));
    Vec inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanh(inner));
}

template <typename T, int A> void activate(T *out, const T *x, int64_t count, int threads) {
    parallel((count + kLanes - 1) / kLanes, threads_for(count * kActivationWork, threads), [=](int64_t start, int64_t stop) {
        for (int64_t c = start * kLanes; c < std::min(stop * kLanes, count); c += kLanes) {
            int some = int(std::min<int64_t>(count - c, kLanes));
            store_some(out + c, activated<A>(load_some(x + c, some)), some);
        }
    });
}

template <typename T, int A> void gate(T *out, const T *gate_up, int64_t rows, int64_t columns, int threads) {
    parallel(rows, threads_for(rows * columns * kActivationWork, threads), [=](int64_t start, int64_t stop) {
        for (int64_t row = start; row < stop; row++) {
            const T *gates = gate_up + row * 2 * columns, *ups = gates + columns;
            for (int64_t c = 0; c < columns; c += kLanes) {
                int count = int(std::min<int64_t>(columns - c, kLanes));
                Vec value = rounded<T>(activated<A>(load_some(gates + c, count)));
                store_some(out + row * columns + c, value * load_some(ups + c, count), count);
            }
        }
    });
}

template <typename T> void activate(T *out, const T *x, int activation, int64_t count, int threads) {
    if (activation == kSilu) activate<T, kSilu>(out, x, count, threads);
    if (activation == kGeluTanh) activate<T, kGeluTanh>(out, x, count, threads);
    if (activation == kRelu) activate<T, kRelu>(out, x, count, threads);
}

template <typename T>
void gate(T *out, const T *gate_up, int activation, int64_t rows, int64_t columns, int threads) {
    if (activation == kSilu) gate<T, kSilu>(out, gate_up, rows, columns, threads);
    if (activation == kGeluTanh) gate<T, kGeluTanh>(out, gate_up, rows, columns, threads);
    if (activation == kRelu) gate<T, kRelu>(out, gate_up, rows, columns, threads);
}

}  // namespace
}  // namespace graft

using namespace graft;

// out, x: [count]; they may be the same. activation: 0 SiLU, 1 GELU by tanh, 2 ReLU.
GRAFT_API void graft_activate(void *out, const void *x, int dtype, int activation, int64_t count, int threads) {
    if (dtype == 0)
        activate((float *)out, (const float *)x, activation, count, threads);
    else
        activate((bf16 *)out, (const bf16 *)x, activation, count, threads);
}
GRAFT_RECORDABLE(graft_activate)

// out: [rows, columns]. gate_up: [rows, 2 * columns], the gate first. activation: as above.
GRAFT_API void graft_gated_activation(void *out, const void *gate_up, int dtype, int activation, int64_t rows,
                                      int64_t columns, int threads) {
    if (dtype == 0)
        gate((float *)out, (const float *)gate_up, activation, rows, columns, threads);
    else
        gate((bf16 *)out, (const bf16 *)gate_up, activation, rows, columns, threads);
}
GRAFT_RECORDABLE(graft_gated_activation)
