#include "graft.h"
#include "parallel.h"
#include "simd.h"

namespace graft {
namespace {

// Rows of heads: [tokens, heads, head_dim], with strides.
template <typename T> struct Heads {
    T *start;
    int64_t heads, head_dim, token_stride, head_stride;

    T *at(int64_t token, int64_t head) const { return start + token * token_stride + head * head_stride; }
};

// Those of each token: [tokens, half].
template <typename T> struct Angles {
    const T *cos, *sin;
    int64_t half;

    // to: head_dim numbers, and so is `from`; they may be the same.
    void rotate(T *to, const T *from, int64_t head_dim, int64_t token) const {
        for (int64_t c = 0; c < half; c += kLanes) {
            int count = int(std::min<int64_t>(half - c, kLanes));
            Vec first = load_some(from + c, count), second = load_some(from + half + c, count);
            Vec cosine = load_some(cos + token * half + c, count), sine = load_some(sin + token * half + c, count);
            // One product is rounded before the other is added to it: the reference's order.
            store_some(to + c, rounded<T>(first * cosine) - second * sine, count);
            store_some(to + half + c, rounded<T>(second * cosine) + first * sine, count);
        }
        if (to != from) std::memcpy(to + 2 * half, from + 2 * half, size_t(head_dim - 2 * half) * sizeof(T));
    }
};

template <typename T> void rotate(T *out, Heads<const T> x, Angles<T> angles, int64_t tokens, int threads) {
    int64_t work = tokens * x.heads * x.head_dim * kRotaryWork;
    parallel(tokens, threads_for(work, threads), [=](int64_t start, int64_t stop) {
        for (int64_t token = start; token < stop; token++)
            for (int64_t head = 0; head < x.heads; head++)
                angles.rotate(out + (token * x.heads + head) * x.head_dim, x.at(token, head), x.head_dim, token);
    });
}

template <typename T>
void write(T *cache, Heads<const T> rows, const int64_t *slots, int64_t tokens, int threads) {
    int64_t width = rows.heads * rows.head_dim;
    parallel(tokens, threads_for(tokens * width, threads), [=](int64_t start, int64_t stop) {
        for (int64_t token = start; token < stop; token++)
            for (int64_t head = 0; head < rows.heads; head++)
                std::memcpy(cache + slots[token] * width + head * rows.head_dim, rows.at(token, head),
                            size_t(rows.head_dim) * sizeof(T));
    });
}

template <typename T>
void rotate_and_write(Heads<T> query, Heads<const T> key, Heads<const T> value, T *key_cache, T *value_cache,
                      Angles<T> angles, const int64_t *slots, int64_t tokens, int threads) {
    int64_t width = key.heads * key.head_dim;
    int64_t work = tokens * (query.heads + key.heads) * key.head_dim * kRotaryWork;
    parallel(tokens, threads_for(work, threads), [=](int64_t start, int64_t stop) {
        for (int64_t token = start; token < stop; token++) {
            T *keys = key_cache + slots[token] * width, *values = value_cache + slots[token] * width;
            for (int64_t head = 0; head < query.heads; head++)
                angles.rotate(query.at(token, head), query.at(token, head), query.head_dim, token);
            for (int64_t head = 0; head < key.heads; head++) {
                angles.rotate(keys + head * key.head_dim, key.at(token, head), key.head_dim, token);
                std::memcpy(values + head * key.head_dim, value.at(token, head), size_t(key.head_dim) * sizeof(T));
            }
        }
    });
}

// What a step's tokens have in common, as the caller lays it out.
struct RotatedWrite {
    int64_t heads, kv_heads, head_dim, half;
    int64_t query_token_stride, query_head_stride, key_token_stride, key_head_stride;
    int64_t value_token_stride, value_head_stride;
};

template <typename T>
void rotate_and_write(T *query, const T *key, const T *value, T *key_cache, T *value_cache, const T *cos, const T *sin,
                      const int64_t *slots, const RotatedWrite &shape, int64_t tokens, int threads) {
    rotate_and_write(
        Heads<T>{query, shape.heads, shape.head_dim, shape.query_token_stride, shape.query_head_stride},
        Heads<const T>{key, shape.kv_heads, shape.head_dim, shape.key_token_stride, shape.key_head_stride},
        Heads<const T>{value, shape.kv_heads, shape.head_dim, shape.value_token_stride, shape.value_head_stride},
        key_cache, value_cache, Angles<T>{cos, sin, shape.half}, slots, tokens, threads);
}

}  // namespace
}  // namespace graft

using namespace graft;

// out: [tokens, heads, head_dim]. x: the same, with strides between tokens and heads. cos, sin: [tokens, half].
GRAFT_API void graft_apply_rotary(void *out, const void *x, const void *cos, const void *sin, int dtype,
                                  int64_t tokens, int64_t heads, int64_t head_dim, int64_t half, int64_t token_stride,
                                  int64_t head_stride, int threads) {
    if (dtype == 0)
        rotate((float *)out, Heads<const float>{(const float *)x, heads, head_dim, token_stride, head_stride},
               Angles<float>{(const float *)cos, (const float *)sin, half}, tokens, threads);
    else
        rotate((bf16 *)out, Heads<const bf16>{(const bf16 *)x, heads, head_dim, token_stride, head_stride},
               Angles<bf16>{(const bf16 *)cos, (const bf16 *)sin, half}, tokens, threads);
}
GRAFT_RECORDABLE(graft_apply_rotary)

// cache: [slots, heads, head_dim]. rows: [tokens, heads, head_dim] with strides. slots: [tokens], all different.
GRAFT_API void graft_write_kv(void *cache, const void *rows, const int64_t *slots, int dtype, int64_t tokens,
                              int64_t heads, int64_t head_dim, int64_t token_stride, int64_t head_stride,
                              int threads) {
    if (dtype == 0)
        write((float *)cache, Heads<const float>{(const float *)rows, heads, head_dim, token_stride, head_stride},
              slots, tokens, threads);
    else
        write((bf16 *)cache, Heads<const bf16>{(const bf16 *)rows, heads, head_dim, token_stride, head_stride}, slots,
              tokens, threads);
}
GRAFT_RECORDABLE(graft_write_kv)

// query: rotated where it is. key, value: go to their slots of the caches, the key rotated. All as `shape` says; cos,
// sin: [tokens, half].
GRAFT_API void graft_rotate_and_write(void *query, const void *key, const void *value, void *key_cache,
                                      void *value_cache, const void *cos, const void *sin, const int64_t *slots,
                                      const void *shape, int dtype, int64_t tokens, int threads) {
    const auto &of = *(const RotatedWrite *)shape;
    if (dtype == 0)
        rotate_and_write((float *)query, (const float *)key, (const float *)value, (float *)key_cache,
                         (float *)value_cache, (const float *)cos, (const float *)sin, slots, of, tokens, threads);
    else
        rotate_and_write((bf16 *)query, (const bf16 *)key, (const bf16 *)value, (bf16 *)key_cache,
                         (bf16 *)value_cache, (const bf16 *)cos, (const bf16 *)sin, slots, of, tokens, threads);
}
GRAFT_RECORDABLE(graft_rotate_and_write)
