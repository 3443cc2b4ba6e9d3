#include "graft.h"
#include "parallel.h"
#include "simd.h"

namespace graft {
namespace {

template <typename T>
void rotate(T *out, const T *x, const T *cos, const T *sin, int64_t tokens, int64_t heads, int64_t head_dim,
            int64_t half, int64_t token_stride, int64_t head_stride, int threads) {
    parallel(tokens, threads_for(tokens * heads * head_dim * kRotaryWork, threads), [=](int64_t start, int64_t stop) {
        for (int64_t token = start; token < stop; token++)
            for (int64_t head = 0; head < heads; head++) {
                const T *from = x + token * token_stride + head * head_stride;
                T *to = out + (token * heads + head) * head_dim;
                for (int64_t c = 0; c < half; c += kLanes) {
                    int count = int(std::min<int64_t>(half - c, kLanes));
                    Vec first = load_some(from + c, count), second = load_some(from + half + c, count);
                    Vec cosine = load_some(cos + token * half + c, count);
                    Vec sine = load_some(sin + token * half + c, count);
                    // One product is rounded before the other is added to it: the reference's order.
                    store_some(to + c, rounded<T>(first * cosine) - second * sine, count);
                    store_some(to + half + c, rounded<T>(second * cosine) + first * sine, count);
                }
                std::memcpy(to + 2 * half, from + 2 * half, size_t(head_dim - 2 * half) * sizeof(T));
            }
    });
}

template <typename T>
void write(T *cache, const T *rows, const int64_t *slots, int64_t tokens, int64_t width, int64_t token_stride,
           int64_t head_dim, int64_t head_stride, int threads) {
    parallel(tokens, threads_for(tokens * width, threads), [=](int64_t start, int64_t stop) {
        for (int64_t token = start; token < stop; token++)
            for (int64_t head = 0; head < width / head_dim; head++)
                std::memcpy(cache + slots[token] * width + head * head_dim,
                            rows + token * token_stride + head * head_stride, size_t(head_dim) * sizeof(T));
    });
}

}  // namespace
}  // namespace graft

using namespace graft;

// out: [tokens, heads, head_dim]. x: the same, with strides between tokens and heads. cos, sin: [tokens, half].
GRAFT_API void graft_apply_rotary(void *out, const void *x, const void *cos, const void *sin, int dtype,
                                  int64_t tokens, int64_t heads, int64_t head_dim, int64_t half, int64_t token_stride,
                                  int64_t head_stride, int threads) {
    if (dtype == 0)
        rotate((float *)out, (const float *)x, (const float *)cos, (const float *)sin, tokens, heads, head_dim, half,
               token_stride, head_stride, threads);
    else
        rotate((bf16 *)out, (const bf16 *)x, (const bf16 *)cos, (const bf16 *)sin, tokens, heads, head_dim, half,
               token_stride, head_stride, threads);
}

// cache: [slots, heads, head_dim]. rows: [tokens, heads, head_dim] with strides. slots: [tokens], all different.
GRAFT_API void graft_write_kv(void *cache, const void *rows, const int64_t *slots, int dtype, int64_t tokens,
                              int64_t heads, int64_t head_dim, int64_t token_stride, int64_t head_stride,
                              int threads) {
    if (dtype == 0)
        write((float *)cache, (const float *)rows, slots, tokens, heads * head_dim, token_stride, head_dim,
              head_stride, threads);
    else
        write((bf16 *)cache, (const bf16 *)rows, slots, tokens, heads * head_dim, token_stride, head_dim, head_stride,
              threads);
}
