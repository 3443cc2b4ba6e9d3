// Causal attention over a paged cache of keys and values.
//
// Keys are taken in tiles of 64 that begin at multiples of 64 in the sequence, with a softmax that is corrected from
// tile to tile. What a position reads and in which order is therefore its own: chunks, neighbours and cached prefixes
// change nothing. A single new position is attended with all heads at once; several share each key they read, a
// position and head per lane, or per row of a tile.
// Sources: PagedAttention, arXiv 2309.06180; the running softmax, arXiv 1805.02867.
#include <atomic>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "attention_position.h"
#include "attention_tiles.h"
#include "graft.h"
#include "parallel.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace graft {
namespace {

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

// Some KV heads of a sequence; of one alone, which of its (query, head) pairs.
struct Item {
    int64_t sequence, kv_head, kv_heads, pair, count;
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

// How many KV heads of a position make an item: all, but for that every thread is to have a few.
inline int64_t kv_heads_together(int64_t positions, int64_t kv_heads, int team) {
    constexpr int64_t kItems = 4;
    int64_t parts = std::min(kv_heads, (kItems * team + positions - 1) / std::max<int64_t>(positions, 1));
    return team > 1 ? (kv_heads + parts - 1) / parts : kv_heads;
}

template <int DIM, typename T>
void attention_of(T *out, const T *query, const T *keys, const T *values, const Sequence *sequences,
                  int64_t num_sequences, const Shape &shape, const Scores &scores, bool by_position, int threads) {
    int64_t group = shape.heads / shape.kv_heads, work = 0, positions = 0;
    for (int64_t s = 0; s < num_sequences; s++) {
        work += sequences[s].query_len * shape.heads * sequences[s].total_len * shape.head_dim;
        positions += sequences[s].query_len == 1;
    }
    int team = threads_for(work, threads);
    int64_t together = kv_heads_together(positions, shape.kv_heads, team);
    std::vector<Item> items;
    for (int64_t s = 0; s < num_sequences; s++) {
        int64_t pairs = sequences[s].query_len * group;
        if (pairs == group) continue;
        for (int64_t kv_head = 0; kv_head < shape.kv_heads; kv_head++) {
            // The last pairs read the most keys; a thread that takes them first ends with the rest.
            int64_t step = by_position ? group * 4 : Pairs<T>::together(pairs);
            for (int64_t pair = (pairs - 1) / step * step; pair >= 0; pair -= step)
                items.push_back({s, kv_head, 1, pair, std::min(step, pairs - pair)});
        }
    }
    for (int64_t s = 0; s < num_sequences; s++) {
        if (sequences[s].query_len > 1) continue;
        for (int64_t kv_head = 0; kv_head < shape.kv_heads; kv_head += together)
            items.push_back({s, kv_head, std::min(together, shape.kv_heads - kv_head), 0, group});
    }
    // A thread takes the next item before it begins with the last one it took: it fetches its first keys meanwhile.
    std::atomic<size_t> taken{0};
#pragma omp parallel num_threads(team) if (team > 1)
    {
        typedef PositionAttention<T, DIM> Position;
        Pairs<T> pairs;
        Position position;
        auto rows = [&](const Item &item) { return out + sequences[item.sequence].row * shape.heads * shape.head_dim; };
        auto queries = [&](const Item &item) { return query + sequences[item.sequence].row * shape.query_row_stride; };
        auto cache = [&](const Item &item) {
            return Cache<T>{keys, values, shape, sequences[item.sequence], item.kv_head};
        };
        // The n-th query of the item's sequence.
        auto at = [&](const Item &item, int64_t n) {
            const Sequence &sequence = sequences[item.sequence];
            return typename Position::Item{rows(item) + n * shape.heads * shape.head_dim,
                                           queries(item) + n * shape.query_row_stride,
                                           cache(item),
                                           item.kv_heads,
                                           sequence.total_len - sequence.query_len + n,
                                           sequence.first_block * shape.block_size};
        };
        size_t index = taken++;
        while (index < items.size()) {
            const Item &item = items[index];
            index = taken++;
            const Sequence &sequence = sequences[item.sequence];
            if (sequence.query_len == 1) {
                if (index < items.size()) {
                    auto next = at(items[index], 0);
                    position.attend(at(item, 0), &next, scores);
                } else {
                    position.attend(at(item, 0), nullptr, scores);
                }
            } else if (by_position) {
                for (int64_t n = item.pair / group; n < (item.pair + item.count) / group; n++)
                    position.attend(at(item, n), nullptr, scores);
            } else {
                pairs.attend(rows(item), queries(item), cache(item), scores, item.pair, item.count,
                             sequence.first_block * shape.block_size);
            }
        }
    }
}

template <typename T, typename... Rest>
void attention(T *out, const T *query, const T *keys, const T *values, const Sequence *sequences,
               int64_t num_sequences, const Shape &shape, const Rest &...rest) {
    auto *of = shape.head_dim == 64    ? attention_of<64, T>
               : shape.head_dim == 128 ? attention_of<128, T>
                                       : attention_of<0, T>;
    of(out, query, keys, values, sequences, num_sequences, shape, rest...);
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
GRAFT_RECORDABLE(graft_paged_attention)
