// Attention of one new position, whose keys and values are read once each: what counts is that they arrive in time.
//
// All heads of an item go through the keys together, tile by tile, so that memory is read in the order in which it
// lies; the next tile, or the first of the next item, is fetched meanwhile. Lanes are dimensions in the scores, whose
// sums over lanes are made for as many keys at once as there are lanes, and columns in the values. Where bfloat16 has a
// dot product, weights are rounded to it, their sum is not. Keys that a tile lacks have a weight of zero.
#pragma once

#include <type_traits>
#include <vector>

#include "attention.h"
#include "panels.h"
#include "transpose.h"

namespace graft {

// The head's query as the products below read it: bfloat16 where there is a dot product for it.
template <typename T> struct Queries {
    typedef float Element;
};
#if defined(__AVX512BF16__)
template <> struct Queries<bf16> {
    typedef bf16 Element;
};
#endif

// Where the keys and values of a tile are, for the first of an item's KV heads.
template <typename T> struct TileRows {
    int64_t first = 0, count = 0;
    const T *keys[kTile], *values[kTile];

    void find(const Cache<T> &cache, int64_t start, int64_t oldest, int64_t position) {
        first = std::max(start, oldest);
        count = std::min(position + 1, start + kTile) - first;
        cache.find(keys, values, first, first + count);
        // What is read of more rows than there are has no weight.
        for (int64_t index = count; index % kLanes; index++) {
            keys[index] = keys[count - 1];
            values[index] = values[count - 1];
        }
    }

    static void fetch(const T *row, int64_t dim) {
        constexpr int64_t kLine = 64 / sizeof(T);
        for (int64_t d = 0; d < dim; d += kLine) __builtin_prefetch(row + d);
    }
};

// DIM: the head's dimension, or 0 for any.
template <typename T, int DIM> class PositionAttention {
  public:
    // One position and its KV heads from the cache's on; out, query: of the position's first head.
    struct Item {
        T *out;
        const T *query;
        Cache<T> cache;
        int64_t kv_heads, position, origin;
    };

    // next: what is fetched at the end, or null.
    void attend(const Item &item, const Item *next, const Scores &scores) {
        const Shape &shape = item.cache.shape;
        int64_t group = shape.heads / shape.kv_heads, begin = item.cache.kv_head * group;
        any_dim_ = shape.head_dim;
        start(item, scores, begin, item.kv_heads * group);
        int64_t oldest = oldest_seen(item.position, shape.window), start = oldest / kTile * kTile;
        TileRows<T> tiles[2], *tile = &tiles[0], *upcoming = &tiles[1];
        tile->find(item.cache, start, oldest, item.position);
        for (; start <= item.position; start += kTile, std::swap(tile, upcoming)) {
            if (start + kTile <= item.position)
                upcoming->find(item.cache, start + kTile, oldest, item.position);
            else if (next)
                find_first(*upcoming, *next);
            else
                upcoming->count = 0;
            for (int64_t kv_head = 0; kv_head < item.kv_heads; kv_head++) {
                attend_group(*tile, *upcoming, scores, kv_head, group, begin, item.origin);
            }
        }
        for (int64_t head = 0; head < item.kv_heads * group; head++)
            finish(item.out + (begin + head) * dim(), totals_.data() + head * padded(), mass_[size_t(head)]);
    }

  private:
    typedef typename Queries<T>::Element Element;
    static constexpr bool kInPairs = std::is_same_v<Element, bf16>;
    static constexpr int64_t kBlock = 2 * kLanes;  // columns that are summed together
    static constexpr int kHeads = 4;               // that share each key they read
    static constexpr int kKeys = kLanes == 16 ? 4 : 2;

    int64_t dim() const { return DIM ? DIM : any_dim_; }
    int64_t padded() const { return round_up(dim(), kBlock); }

    void start(const Item &item, const Scores &scores, int64_t begin, int64_t heads) {
        queries_.resize(size_t(heads * padded()));
        totals_.resize(size_t(heads * padded()));
        std::fill_n(queries_.data(), heads * padded(), narrow<Element>(0.0f));
        std::fill_n(totals_.data(), heads * padded(), 0.0f);
        highest_.assign(size_t(heads), -__builtin_inff());
        mass_.assign(size_t(heads), scores.sinks ? 1.0f : 0.0f);
        for (int64_t head = 0; head < heads; head++) {
            if (scores.sinks) highest_[size_t(head)] = scores.sinks[begin + head];
            const T *query = item.query + (begin + head) * item.cache.shape.query_head_stride;
            for (int64_t d = 0; d < dim(); d++) queries_.data()[head * padded() + d] = narrow<Element>(widen(query[d]));
        }
    }

    static void find_first(TileRows<T> &rows, const Item &item) {
        int64_t oldest = oldest_seen(item.position, item.cache.shape.window);
        rows.find(item.cache, oldest / kTile * kTile, oldest, item.position);
    }

    void attend_group(const TileRows<T> &rows, const TileRows<T> &upcoming, const Scores &scores, int64_t kv_head,
                      int64_t group, int64_t begin, int64_t origin) {
        const TileRows<T> nothing{};  // its count is all that is read
        int64_t g = 0;
        auto at = [&](auto heads) {
            constexpr int G = decltype(heads)::value;
            // The first heads fetch for all that share the rows.
            attend_tile<G>(rows, g ? nothing : upcoming, scores, kv_head * dim(), kv_head * group + g, begin, origin);
            g += G;
        };
        while (g + kHeads <= group) at(std::integral_constant<int, kHeads>{});
        if (g + 3 == group) at(std::integral_constant<int, 3>{});
        if (g + 2 == group) at(std::integral_constant<int, 2>{});
        if (g + 1 == group) at(std::integral_constant<int, 1>{});
    }

    template <int G>
    void attend_tile(const TileRows<T> &rows, const TileRows<T> &upcoming, const Scores &scores, int64_t offset,
                     int64_t head, int64_t begin, int64_t origin) {
        const Element *queries = queries_.data() + head * padded();
        for (int64_t index = 0; index < rows.count; index += kLanes) {
            for (int64_t next = index; next < std::min(index + kLanes, upcoming.count); next++) {
                TileRows<T>::fetch(upcoming.keys[next] + offset, dim());
                TileRows<T>::fetch(upcoming.values[next] + offset, dim());
            }
            Vec products[G];
            score_keys<G>(products, queries, rows.keys + index, offset);
            for (int g = 0; g < G; g++) {
                Vec score = capped(scores, products[g]), lanes = lane_numbers() + float(index);
                if (scores.slopes)
                    score += alibi<T>(scores, splat(scores.slopes[begin + head + g]),
                                      lanes + float(rows.first - origin));
                score = select(lanes < float(rows.count), score, splat(-__builtin_inff()));
                store(weights_ + g * kTile + index, score);
            }
        }
        float corrections[G];
        for (int g = 0; g < G; g++) corrections[g] = weigh(weights_ + g * kTile, rows.count, size_t(head + g), g);
        float *totals = totals_.data() + head * padded();
        int64_t d = 0;
        for (; d + 2 * kBlock <= dim(); d += 2 * kBlock)
            add_values<G, 2, true>(totals + d, corrections, rows, offset + d, 2 * kBlock);
        if (d + kBlock <= dim()) {
            add_values<G, 1, true>(totals + d, corrections, rows, offset + d, kBlock);
            d += kBlock;
        }
        if (d < dim()) add_values<G, 1, false>(totals + d, corrections, rows, offset + d, dim() - d);
    }

    // A lane for each of as many keys as there are lanes.
    template <int G>
    void score_keys(Vec (&products)[G], const Element *queries, const T *const *rows, int64_t offset) const {
        constexpr int kApart = kLanes / kKeys;
        Vec sums[kApart][G];
        for (int first = 0; first < kApart; first++) {
            const T *keys[kKeys];
            for (int k = 0; k < kKeys; k++) keys[k] = rows[first + k * kApart] + offset;
            Vec total[kKeys][G] = {};
            int64_t d = 0;
            for (; d + kBlock <= dim(); d += kBlock) multiply_keys<G, true>(total, queries + d, keys, d);
            if (d < dim()) multiply_keys<G, false>(total, queries + d, keys, d);
            for (int g = 0; g < G; g++) {
                Vec own[kKeys];
                for (int k = 0; k < kKeys; k++) own[k] = total[k][g];
                sums[first][g] = folded<kLanes / 2>(own);
            }
        }
        for (int g = 0; g < G; g++) {
            Vec own[kApart];
            for (int first = 0; first < kApart; first++) own[first] = sums[first][g];
            products[g] = folded<kApart / 2>(own);
        }
    }

    // Of dimensions from `d` on: a block of them, or fewer if it is not whole.
    template <int G, bool kWhole>
    void multiply_keys(Vec (&total)[kKeys][G], const Element *queries, const T *const (&keys)[kKeys], int64_t d) const {
#if defined(__AVX512BF16__)
        if constexpr (kInPairs) {
            // Products of bfloat16 are exact in float32, so both kinds of dot product differ in the order of the sum.
            __m512bh query[G];
            for (int g = 0; g < G; g++) query[g] = (__m512bh)_mm512_loadu_si512(queries + g * padded());
            for (int k = 0; k < kKeys; k++) {
                __m512bh key = pairs<kWhole>(keys[k] + d, dim() - d);
                for (int g = 0; g < G; g++) total[k][g] = (Vec)_mm512_dpbf16_ps((__m512)total[k][g], query[g], key);
            }
            return;
        }
#endif
        if constexpr (!kInPairs)
            for (int v = 0; v < kBlock; v += kLanes)
                for (int k = 0; k < kKeys; k++) {
                    Vec key = some<kWhole>(keys[k] + d + v, dim() - d - v);
                    for (int g = 0; g < G; g++) total[k][g] += key * load(queries + g * padded() + v);
                }
    }

    template <bool kWhole> static Vec some(const T *from, int64_t left) {
        if constexpr (kWhole) return load(from);
        return load_some(from, int(std::clamp<int64_t>(left, 0, kLanes)));
    }

#if defined(__AVX512BF16__)
    template <bool kWhole> static __m512bh pairs(const bf16 *from, int64_t left) {
        if constexpr (kWhole) return (__m512bh)_mm512_loadu_si512(from);
        return (__m512bh)_mm512_maskz_loadu_epi16((1u << left) - 1, from);
    }
#endif

    // The weights of `count` scores in their place, and what totals so far are to be multiplied with.
    float weigh(float *row, int64_t count, size_t head, int g) {
        Vec best = load(row);
        for (int64_t index = kLanes; index < count; index += kLanes) best = max(best, load(row + index));
        float top = std::max(highest_[head], largest(best));
        float correction = top == highest_[head] ? 1.0f : exp(splat(highest_[head] - top))[0];
        highest_[head] = top;
        Vec total{};
        for (int64_t index = 0; index < count; index += kLanes) {
            Vec weight = exp(load(row + index) - top);
            if constexpr (kInPairs)
                store(pairs_of_weights_ + g * kTile + index, weight);
            else
                store(row + index, weight);
            total += weight;
        }
        mass_[head] = mass_[head] * correction + sum(total);
        return correction;
    }

    // totals[g][...] = corrections[g] * totals[g][...] + weights[g][i] * rows[i][...], for B blocks of columns or, if
    // it is not whole, `left` of one.
    template <int G, int B, bool kWhole>
    void add_values(float *totals, const float (&corrections)[G], const TileRows<T> &rows, int64_t offset,
                    int64_t left) const {
        constexpr int V = 2 * B;
        Vec total[G][V];
        for (int g = 0; g < G; g++)
            for (int v = 0; v < V; v++) total[g][v] = load(totals + g * padded() + v * kLanes) * corrections[g];
#if defined(__AVX512BF16__)
        if constexpr (kInPairs) {
            // Two rows at once, whose numbers are brought side by side; `finish` puts the columns in order.
            for (int64_t index = 0; index < rows.count; index += 2) {
                const T *even = rows.values[index] + offset;
                const T *odd = rows.values[index + 1] + offset;
                __m512bh weights[G];
                for (int g = 0; g < G; g++) {
                    int32_t pair;
                    std::memcpy(&pair, pairs_of_weights_ + g * kTile + index, 4);
                    weights[g] = (__m512bh)_mm512_set1_epi32(pair);
                }
                for (int b = 0; b < B; b++) {
                    auto first = (__m512i)pairs<kWhole>(even + b * kBlock, left);
                    auto second = (__m512i)pairs<kWhole>(odd + b * kBlock, left);
                    auto low = (__m512bh)_mm512_unpacklo_epi16(first, second);
                    auto high = (__m512bh)_mm512_unpackhi_epi16(first, second);
                    for (int g = 0; g < G; g++) {
                        Vec *at = total[g] + 2 * b;
                        at[0] = (Vec)_mm512_dpbf16_ps((__m512)at[0], low, weights[g]);
                        at[1] = (Vec)_mm512_dpbf16_ps((__m512)at[1], high, weights[g]);
                    }
                }
            }
        }
#endif
        if constexpr (!kInPairs)
            for (int64_t index = 0; index < rows.count; index++)
                for (int v = 0; v < V; v++) {
                    Vec value = some<kWhole>(rows.values[index] + offset + v * kLanes, left - v * kLanes);
                    for (int g = 0; g < G; g++) total[g][v] += value * weights_[g * kTile + index];
                }
        for (int g = 0; g < G; g++)
            for (int v = 0; v < V; v++) store(totals + g * padded() + v * kLanes, total[g][v]);
    }

    void finish(T *out, const float *totals, float mass) const {
        for (int64_t d = 0; d < dim(); d += kBlock) {
            Vec first = load(totals + d) / mass, second = load(totals + d + kLanes) / mass;
#if defined(__AVX512BF16__)
            if constexpr (kInPairs) {
                Vec low = first, high = second;
                first = __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19,  //
                                                4, 5, 6, 7, 20, 21, 22, 23);
                second = __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27,  //
                                                 12, 13, 14, 15, 28, 29, 30, 31);
            }
#endif
            int left = int(std::min<int64_t>(dim() - d, kBlock));
            store_some(out + d, first, std::min(left, kLanes));
            if (left > kLanes) store_some(out + d + kLanes, second, left - kLanes);
        }
    }

    int64_t any_dim_ = 0;
    // Of all heads of an item.
    Lines<Element> queries_;        // [heads][padded]
    Lines<float> totals_;           // [heads][padded]
    std::vector<float> highest_, mass_;
    // Of up to kHeads by kTile keys.
    alignas(64) float weights_[kHeads * kTile];
    alignas(64) bf16 pairs_of_weights_[kHeads * kTile];
};

}  // namespace graft
