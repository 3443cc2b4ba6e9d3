// Causal attention over a paged cache of keys and values.
//
// Keys are taken in tiles of 64 that begin at multiples of 64 in the sequence, with a softmax that is corrected from
// tile to tile. What a position reads and in which order is therefore its own: chunks, neighbours and cached prefixes
// change nothing. A single new position is attended head by head; several share each key they read, a position and
// head per lane, or per row of a tile.
// Sources: PagedAttention, arXiv 2309.06180; the running softmax, arXiv 1805.02867.
#include <type_traits>
#include <vector>

#include "attention.h"
#include "attention_tiles.h"
#include "graft.h"
#include "parallel.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace graft {
namespace {

// Heads that share each key they read.
constexpr int kGroup = 4;

// values: a whole tile.
float largest(const float *values) {
    Vec best = load(values);
    for (int64_t index = kLanes; index < kTile; index += kLanes) best = max(best, load(values + index));
    float lanes[kLanes], top;
    store(lanes, best);
    top = lanes[0];
    for (int lane = 1; lane < kLanes; lane++) top = std::max(top, lanes[lane]);
    return top;
}

// ---- one position

// Rows of one KV head lie apart from each other: the processor does not guess the next one.
constexpr int64_t kAhead = 8;

template <typename T> void fetch(const T *row, int64_t dim) {
    constexpr int64_t kLine = 64 / sizeof(T);
    for (int64_t d = 0; d < dim; d += kLine) __builtin_prefetch(row + d);
}

// The head's query as the products below read it.
template <typename T> struct Queries {
    typedef float Element;
};
#if defined(__AVX512BF16__)
template <> struct Queries<bf16> {
    typedef bf16 Element;
};
#endif

template <int G, typename T> void dot(float (&out)[G], const float *queries, const T *key, int64_t padded, int64_t dim) {
    Vec total[G] = {};
    for (int64_t d = 0; d < dim; d += kLanes) {
        Vec part = load_some(key + d, int(std::min<int64_t>(dim - d, kLanes)));
        for (int g = 0; g < G; g++) total[g] += part * load(queries + g * padded + d);
    }
    for (int g = 0; g < G; g++) out[g] = sum(total[g]);
}

#if defined(__AVX512BF16__)
// Products of bfloat16 are exact in float32, so both kinds of dot product differ in the order of the sum alone.
template <int G> void dot(float (&out)[G], const bf16 *queries, const bf16 *key, int64_t padded, int64_t dim) {
    __m512 total[G] = {};
    for (int64_t d = 0; d < dim; d += 2 * kLanes) {
        int64_t left = dim - d;
        __mmask32 some = left >= 2 * kLanes ? ~0u : (1u << left) - 1;
        __m512bh part = (__m512bh)_mm512_maskz_loadu_epi16(some, key + d);
        for (int g = 0; g < G; g++)
            total[g] = _mm512_dpbf16_ps(total[g], (__m512bh)_mm512_loadu_si512(queries + g * padded + d), part);
    }
    for (int g = 0; g < G; g++) out[g] = sum((Vec)total[g]);
}
#endif

// totals[g][...] += weights[g][i] * rows[i][...], for V vectors of columns from `d` on.
template <int G, int V, typename T>
void add_values(float *totals, const float *weights, const T *const *rows, int64_t count, int64_t padded, int64_t d,
                int64_t dim) {
    Vec total[G][V];
    for (int g = 0; g < G; g++)
        for (int v = 0; v < V; v++) total[g][v] = load(totals + g * padded + d + v * kLanes);
    int some = int(std::min<int64_t>(dim - d - (V - 1) * kLanes, kLanes));
    for (int64_t index = 0; index < count; index++)
        for (int v = 0; v < V; v++) {
            const T *from = rows[index] + d + v * kLanes;
            Vec part = v < V - 1 ? load(from) : load_some(from, some);
            for (int g = 0; g < G; g++) total[g][v] += part * weights[g * kTile + index];
        }
    for (int g = 0; g < G; g++)
        for (int v = 0; v < V; v++) store(totals + g * padded + d + v * kLanes, total[g][v]);
}

template <typename T, int G>
void attend_position(T *out, const T *query, const Cache<T> &cache, const Scores &scores, int64_t position,
                     int64_t head, int64_t origin) {
    const Shape &shape = cache.shape;
    typedef typename Queries<T>::Element Element;
    int64_t padded = (shape.head_dim + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
    std::vector<float> scratch(size_t(2 * G * padded + G * kTile));
    float *totals = scratch.data(), *weights = totals + G * padded;
    auto *queries = reinterpret_cast<Element *>(weights + G * kTile);
    for (int g = 0; g < G; g++)
        for (int64_t d = 0; d < shape.head_dim; d++)
            queries[g * padded + d] = narrow<Element>(widen(query[g * shape.query_head_stride + d]));
    const T *keys[kTile], *values[kTile];
    float highest[G], mass[G];
    for (int g = 0; g < G; g++) {
        highest[g] = scores.sinks ? scores.sinks[head + g] : -__builtin_inff();
        mass[g] = scores.sinks ? 1.0f : 0.0f;
    }
    int64_t oldest = oldest_seen(position, shape.window);
    for (int64_t start = oldest / kTile * kTile; start <= position; start += kTile) {
        int64_t first = std::max(start, oldest), stop = std::min(position + 1, start + kTile);
        int64_t count = stop - first;
        cache.find(keys, values, first, stop);
        for (int64_t index = 0; index < count; index++) {
            float products[G];
            fetch(keys[std::min(index + kAhead, count - 1)], shape.head_dim);
            fetch(values[index], shape.head_dim);
            dot<G>(products, queries, keys[index], padded, shape.head_dim);
            for (int g = 0; g < G; g++) weights[g * kTile + index] = products[g];
        }
        for (int g = 0; g < G; g++) {
            float *row = weights + g * kTile;
            for (int64_t index = 0; index < count; index += kLanes) {
                Vec score = capped(scores, load(row + index));
                if (scores.slopes)
                    score += alibi<T>(scores, splat(scores.slopes[head + g]),
                                      lane_numbers() + float(first + index - origin));
                store(row + index, score);
            }
            std::fill(row + count, row + kTile, -__builtin_inff());
            float top = std::max(highest[g], largest(row));
            float correction = top == highest[g] ? 1.0f : exp(splat(highest[g] - top))[0];
            highest[g] = top;
            Vec total{};
            for (int64_t index = 0; index < kTile; index += kLanes) {
                Vec weight = exp(load(row + index) - top);
                store(row + index, weight);
                total += weight;
            }
            mass[g] = mass[g] * correction + sum(total);
            float *sums = totals + g * padded;
            if (correction != 1.0f)
                for (int64_t d = 0; d < padded; d += kLanes) store(sums + d, load(sums + d) * correction);
        }
        int64_t d = 0;
        for (; d + 4 * kLanes <= shape.head_dim; d += 4 * kLanes)
            add_values<G, 4>(totals, weights, values, count, padded, d, shape.head_dim);
        for (; d < shape.head_dim; d += kLanes)
            add_values<G, 1>(totals, weights, values, count, padded, d, shape.head_dim);
    }
    for (int g = 0; g < G; g++)
        for (int64_t d = 0; d < shape.head_dim; d += kLanes)
            store_some(out + g * shape.head_dim + d, load(totals + g * padded + d) / mass[g],
                       int(std::min<int64_t>(shape.head_dim - d, kLanes)));
}

template <typename T>
void attend_heads(T *out, const T *query, const Cache<T> &cache, const Scores &scores, int64_t position,
                  int64_t origin) {
    const Shape &shape = cache.shape;
    int64_t group = shape.heads / shape.kv_heads, begin = cache.kv_head * group;
    int64_t g = 0;
    auto at = [&](auto heads) {
        attend_position<T, decltype(heads)::value>(out + (begin + g) * shape.head_dim,
                                                   query + (begin + g) * shape.query_head_stride, cache, scores,
                                                   position, begin + g, origin);
        g += decltype(heads)::value;
    };
    while (g + kGroup <= group) at(std::integral_constant<int, kGroup>{});
    while (g + 3 <= group) at(std::integral_constant<int, 3>{});
    while (g + 2 <= group) at(std::integral_constant<int, 2>{});
    while (g < group) at(std::integral_constant<int, 1>{});
}

// ---- several positions

// A row of keys or values as float32.
inline const float *widened(float *scratch, const bf16 *row, int64_t dim) {
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) store(scratch + d, load(row + d));
    for (; d < dim; d++) scratch[d] = widen(row[d]);
    return scratch;
}
inline const float *widened(float *, const float *row, int64_t) { return row; }

// total[i][l] += sum over d of turned[d][l] * rows[i][d]: a lane per query, L vectors of them.
template <int N, int L>
void products(Vec (&total)[N][L], const float *turned, const float *const *rows, int64_t dim) {
    for (int64_t d = 0; d < dim; d++) {
        Vec query[L];
        for (int l = 0; l < L; l++) query[l] = load(turned + (d * L + l) * kLanes);
        for (int i = 0; i < N; i++)
            for (int l = 0; l < L; l++) total[i][l] += query[l] * rows[i][d];
    }
}

template <int L, typename T> void turn(float *turned, const T *query, int lane, int64_t dim) {
    for (int64_t d = 0; d < dim; d++) turned[d * L * kLanes + lane] = widen(query[d]);
}

#if defined(__AVX512BF16__)
// The same with two dimensions per lane, the first of them even; a last odd one is paired with zero.
template <int N, int L>
void products(Vec (&total)[N][L], const bf16 *turned, const bf16 *const *rows, int64_t dim) {
    auto add = [&](int64_t d, auto pair_of) {
        __m512bh query[L];
        for (int l = 0; l < L; l++)
            query[l] = (__m512bh)_mm512_loadu_si512(turned + (d / 2 * L + l) * 2 * kLanes);
        for (int i = 0; i < N; i++) {
            __m512bh key = (__m512bh)_mm512_set1_epi32(pair_of(rows[i] + d));
            for (int l = 0; l < L; l++) total[i][l] = (Vec)_mm512_dpbf16_ps((__m512)total[i][l], query[l], key);
        }
    };
    int64_t d = 0;
    for (; d + 2 <= dim; d += 2)
        add(d, [](const bf16 *at) {
            int32_t pair;
            std::memcpy(&pair, at, 4);
            return pair;
        });
    if (d < dim) add(d, [](const bf16 *at) { return int32_t(at->bits); });
}

template <int L> void turn(bf16 *turned, const bf16 *query, int lane, int64_t dim) {
    for (int64_t d = 0; d < dim; d++) turned[(d / 2 * L * kLanes + lane) * 2 + d % 2] = query[d];
    if (dim % 2) turned[(dim / 2 * L * kLanes + lane) * 2 + 1] = bf16{0};
}
#endif

// Keys as `products` reads them.
template <typename T> const T *as_read(float *, const T *row, int64_t, const T *) { return row; }
inline const float *as_read(float *scratch, const bf16 *row, int64_t dim, const float *) {
    return widened(scratch, row, dim);
}

// `count` (query, head) pairs that share one KV head, from pair `pair` of the sequence on; pairs run over the heads of
// a query first. L vectors hold them all.
template <int L, typename T>
void attend_lanes(T *out, const T *query, const Cache<T> &cache, const Scores &scores, int64_t pair, int count,
                  int64_t origin, std::vector<float> &scratch) {
    constexpr int kWidth = L * kLanes;
    typedef typename Queries<T>::Element Element;
    const Shape &shape = cache.shape;
    int64_t group = shape.heads / shape.kv_heads, begin = cache.kv_head * group;
    int64_t dim = shape.head_dim, base = cache.sequence.total_len - cache.sequence.query_len;
    scratch.resize(size_t((2 * dim + 1 + kTile) * kWidth + kTile * dim * 2));
    float *totals = scratch.data(), *weights = totals + dim * kWidth;
    float *key_rows = weights + kTile * kWidth, *value_rows = key_rows + kTile * dim;
    auto *turned = reinterpret_cast<Element *>(value_rows + kTile * dim);
    std::fill_n(totals, dim * kWidth, 0.0f);
    Vec position[L], slope[L] = {}, highest[L], mass[L] = {}, seen_from[L];
    for (int lane = 0; lane < kWidth; lane++) {
        int64_t one = pair + std::min(lane, count - 1), head = begin + one % group;
        int l = lane / kLanes, within = lane % kLanes;
        position[l][within] = float(base + one / group);
        turn<L>(turned, query + one / group * shape.query_row_stride + head * shape.query_head_stride, lane, dim);
        if (scores.slopes) slope[l][within] = scores.slopes[head];
        highest[l][within] = scores.sinks ? scores.sinks[head] : -__builtin_inff();
        if (scores.sinks) mass[l][within] = 1.0f;
    }
    for (int l = 0; l < L; l++)
        seen_from[l] = shape.window > 0 ? position[l] - float(shape.window - 1) : splat(0.0f);
    int64_t newest = base + (pair + count - 1) / group;
    int64_t oldest = oldest_seen(base + pair / group, shape.window);
    const T *stored_keys[kTile], *stored_values[kTile];
    const Element *keys[kTile];
    const float *values[kTile];
    for (int64_t start = oldest / kTile * kTile; start <= newest; start += kTile) {
        int64_t first = std::max(start, oldest), stop = std::min(newest + 1, start + kTile), width = stop - first;
        cache.find(stored_keys, stored_values, first, stop);
        for (int64_t index = 0; index < width; index++) {
            keys[index] = as_read(key_rows + index * dim, stored_keys[index], dim, (const Element *)nullptr);
            values[index] = widened(value_rows + index * dim, stored_values[index], dim);
        }
        Vec top[L];
        for (int l = 0; l < L; l++) top[l] = highest[l];
        auto score_keys = [&](int64_t index, auto many) {
            constexpr int N = decltype(many)::value;
            Vec total[N][L] = {};
            products<N, L>(total, turned, keys + index, dim);
            for (int i = 0; i < N; i++)
                for (int l = 0; l < L; l++) {
                    Vec key = splat(float(first + index + i));
                    Vec score = capped(scores, total[i][l]);
                    if (scores.slopes) score += alibi<T>(scores, slope[l], key - float(origin));
                    IntVec hidden = (key > position[l]) | (key < seen_from[l]);
                    score = select(hidden, splat(-__builtin_inff()), score);
                    top[l] = max(top[l], score);
                    store(weights + (index + i) * kWidth + l * kLanes, score);
                }
        };
        constexpr int kKeys = kLanes == 16 ? 8 : 4;
        int64_t index = 0;
        for (; index + kKeys <= width; index += kKeys) score_keys(index, std::integral_constant<int, kKeys>{});
        for (; index < width; index++) score_keys(index, std::integral_constant<int, 1>{});
        Vec correction[L];
        for (int l = 0; l < L; l++) {
            // A lane that has seen no key yet keeps weights of zero.
            Vec reference = select(top[l] == splat(-__builtin_inff()), splat(0.0f), top[l]);
            correction[l] = exp(highest[l] - reference);
            Vec total{};
            for (int64_t i = 0; i < width; i++) {
                float *at = weights + i * kWidth + l * kLanes;
                Vec weight = exp(load(at) - reference);
                store(at, weight);
                total += weight;
            }
            mass[l] = mass[l] * correction[l] + total;
            highest[l] = top[l];
        }
        auto add_columns = [&](int64_t d, auto many) {
            constexpr int N = decltype(many)::value;
            Vec sums[N][L];
            for (int i = 0; i < N; i++)
                for (int l = 0; l < L; l++) sums[i][l] = load(totals + (d + i) * kWidth + l * kLanes) * correction[l];
            for (int64_t key = 0; key < width; key++) {
                Vec weight[L];
                for (int l = 0; l < L; l++) weight[l] = load(weights + key * kWidth + l * kLanes);
                for (int i = 0; i < N; i++)
                    for (int l = 0; l < L; l++) sums[i][l] += weight[l] * values[key][d + i];
            }
            for (int i = 0; i < N; i++)
                for (int l = 0; l < L; l++) store(totals + (d + i) * kWidth + l * kLanes, sums[i][l]);
        };
        int64_t d = 0;
        for (; d + kKeys <= dim; d += kKeys) add_columns(d, std::integral_constant<int, kKeys>{});
        for (; d < dim; d++) add_columns(d, std::integral_constant<int, 1>{});
    }
    for (int64_t d = 0; d < dim; d++)
        for (int l = 0; l < L; l++) {
            float *at = totals + d * kWidth + l * kLanes;
            store(at, rounded<T>(load(at) / mass[l]));
        }
    for (int lane = 0; lane < count; lane++) {
        int64_t one = pair + lane;
        T *to = out + (one / group * shape.heads + begin + one % group) * dim;
        for (int64_t d = 0; d < dim; d++) to[d] = exactly<T>(totals[d * kWidth + lane]);
    }
}

// ---- sharing out

// One KV head of a sequence, and which of its (query, head) pairs.
struct Item {
    int64_t sequence, kv_head, pair, count;
};

// Pairs of several positions, as this level attends them best.
template <typename T> class Pairs {
  public:
    // How many of them at once, of `all` that a sequence has for one KV head.
    static int64_t together(int64_t all) {
#if defined(__AMX_BF16__)
        if (in_tiles(all)) return TiledAttention::kPairs;
#endif
        (void)all;
        return 2 * kLanes;
    }

    void attend(T *out, const T *query, const Cache<T> &cache, const Scores &scores, int64_t pair, int64_t count,
                int64_t origin) {
#if defined(__AMX_BF16__)
        if constexpr (sizeof(T) == 2)
            if (in_tiles(cache.sequence.query_len * (cache.shape.heads / cache.shape.kv_heads)))
                return tiles_.attend(out, query, cache, scores, pair, count, origin);
#endif
        if (count > kLanes)
            attend_lanes<2>(out, query, cache, scores, pair, int(count), origin, scratch_);
        else
            attend_lanes<1>(out, query, cache, scores, pair, int(count), origin, scratch_);
    }

  private:
    std::vector<float> scratch_;
#if defined(__AMX_BF16__)
    static bool in_tiles(int64_t all) { return sizeof(T) == 2 && TiledAttention::takes(all); }

    TiledAttention tiles_;
#endif
};

template <typename T>
void attention(T *out, const T *query, const T *keys, const T *values, const Sequence *sequences,
               int64_t num_sequences, const Shape &shape, const Scores &scores, bool by_position, int threads) {
    int64_t group = shape.heads / shape.kv_heads, work = 0;
    std::vector<Item> items;
    for (int64_t s = 0; s < num_sequences; s++) {
        int64_t pairs = sequences[s].query_len * group;
        work += pairs * shape.kv_heads * sequences[s].total_len * shape.head_dim;
        for (int64_t kv_head = 0; kv_head < shape.kv_heads; kv_head++) {
            if (sequences[s].query_len == 1) {
                items.push_back({s, kv_head, 0, group});
                continue;
            }
            // The last pairs read the most keys; a thread that takes them first ends with the rest.
            int64_t step = by_position ? group * 4 : Pairs<T>::together(pairs);
            for (int64_t pair = (pairs - 1) / step * step; pair >= 0; pair -= step)
                items.push_back({s, kv_head, pair, std::min(step, pairs - pair)});
        }
    }
    int team = threads_for(work, threads);
#pragma omp parallel num_threads(team) if (team > 1)
    {
        Pairs<T> pairs;
#pragma omp for schedule(dynamic, 1)
        for (size_t index = 0; index < items.size(); index++) {
            const Item &item = items[index];
            const Sequence &sequence = sequences[item.sequence];
            Cache<T> cache{keys, values, shape, sequence, item.kv_head};
            T *rows = out + sequence.row * shape.heads * shape.head_dim;
            const T *queries = query + sequence.row * shape.query_row_stride;
            int64_t origin = sequence.first_block * shape.block_size;
            if (sequence.query_len == 1 || by_position) {
                int64_t base = sequence.total_len - sequence.query_len;
                for (int64_t q = item.pair / group; q < (item.pair + item.count) / group; q++)
                    attend_heads(rows + q * shape.heads * shape.head_dim, queries + q * shape.query_row_stride, cache,
                                 scores, base + q, origin);
                continue;
            }
            pairs.attend(rows, queries, cache, scores, item.pair, item.count, origin);
        }
    }
}

}  // namespace
}  // namespace graft

using namespace graft;

// out: [T, heads, head_dim]. query: the same, with strides. keys, values: [blocks, block_size, kv_heads, head_dim].
// by_position: whether positions that come together are attended as they would be alone, to the bit.
GRAFT_API void graft_paged_attention(void *out, const void *query, const void *keys, const void *values,
                                     const void *sequences, int64_t num_sequences, const void *shape,
                                     const void *scores, int dtype, int by_position, int threads) {
    auto *list = (const Sequence *)sequences;
    auto &dims = *(const Shape *)shape;
    auto &how = *(const Scores *)scores;
    if (dtype == 0)
        attention((float *)out, (const float *)query, (const float *)keys, (const float *)values, list, num_sequences,
                  dims, how, by_position != 0, threads);
    else
        attention((bf16 *)out, (const bf16 *)query, (const bf16 *)keys, (const bf16 *)values, list, num_sequences,
                  dims, how, by_position != 0, threads);
}
