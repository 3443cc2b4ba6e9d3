// Attention of many (query, head) pairs that share one KV head, by tile multiplication.
//
// Of 16 pairs by 64 keys the scores are one product of tiles, what the weights make of the values another; both multiply
// bfloat16 numbers exactly and add in float32. Weights are rounded to bfloat16 for it, their sum is not. Keys and values
// are brought into the tiles' order once for all pairs of a call. A pair's result does not depend on the others: the keys
// lie at fixed places of a tile, those that it does not see as zeros.
// Source: FlashAttention-2, arXiv 2307.08691.
#pragma once

#include "attention.h"
#include "panels.h"
#include "transpose.h"

#if defined(__AMX_BF16__)
namespace graft {

class TiledAttention {
  public:
    static constexpr int64_t kPairs = 128;  // in one call, at most

    // Fewer pairs are not worth bringing the keys into the tiles' order.
    static bool takes(int64_t pairs) { return pairs >= kRows; }

    ~TiledAttention() {
        if (is_configured_) _tile_release();
    }

    // As attend_lanes: `count` pairs from pair `pair` of the sequence on; pairs run over the heads of a query first.
    void attend(bf16 *out, const bf16 *query, const Cache<bf16> &cache, const Scores &scores, int64_t pair,
                int64_t count, int64_t origin) {
        if (!is_configured_) configure(kRows, kRows);
        is_configured_ = true;
        const Shape &shape = cache.shape;
        int64_t group = shape.heads / shape.kv_heads, begin = cache.kv_head * group;
        int64_t base = cache.sequence.total_len - cache.sequence.query_len;
        dim_ = shape.head_dim;
        depth_ = round_up(dim_, kDepth);
        width_ = round_up(dim_, kRows);
        int64_t rows = round_up(count, kRows);
        start(rows);
        for (int64_t row = 0; row < rows; row++) {
            int64_t one = pair + std::min(row, count - 1), head = begin + one % group;
            position_[row] = int32_t(base + one / group);
            oldest_[row] = int32_t(oldest_seen(position_[row], shape.window));
            slope_[row] = scores.slopes ? scores.slopes[head] : 0.0f;
            highest_[row] = scores.sinks ? scores.sinks[head] : -__builtin_inff();
            mass_[row * kLanes] = scores.sinks ? 1.0f : 0.0f;
            if (row >= count) continue;
            const bf16 *from = query + one / group * shape.query_row_stride + head * shape.query_head_stride;
            std::copy_n(from, dim_, queries_.data() + row * depth_);
        }
        int64_t newest = position_[rows - 1];
        for (int64_t first = oldest_[0] / kTile * kTile; first <= newest; first += kTile) {
            int64_t seen = std::max<int64_t>(first, oldest_[0]), stop = std::min(newest + 1, first + kTile);
            read(cache, first, seen, stop);
            int64_t steps = (stop - first + kDepth - 1) / kDepth;
            auto next_seen = [&](int64_t row) {
                while (row < rows && (first > position_[row + kRows - 1] || first + kTile <= oldest_[row])) row += kRows;
                return row;
            };
            // The next rows' scores are in the making while these rows' become weights.
            int64_t row = next_seen(0);
            if (row < rows) multiply_keys(scores_[0], row);
            for (int turn = 0; row < rows; turn ^= 1) {
                int64_t next = next_seen(row + kRows);
                if (next < rows) multiply_keys(scores_[turn ^ 1], next);
                attend_rows(scores, scores_[turn], row, first, origin, steps);
                row = next;
            }
        }
        for (int64_t row = 0; row < count; row++) {
            int64_t one = pair + row;
            bf16 *to = out + (one / group * shape.heads + begin + one % group) * dim_;
            float mass = sum(load(mass_ + row * kLanes));
            for (int64_t d = 0; d < dim_; d += kLanes)
                store_some(to + d, load(totals_.data() + row * width_ + d) / mass,
                           int(std::min<int64_t>(dim_ - d, kLanes)));
        }
    }

  private:
    static constexpr int kRows = 16;
    static constexpr int kVectorsOfKeys = kTile / kLanes;
    static constexpr int64_t kTileSize = 16 * kDepth;  // bfloat16 numbers in one of keys

    void start(int64_t rows) {
        queries_.resize(size_t(rows * depth_));
        std::fill_n(queries_.data(), rows * depth_, bf16{0});
        totals_.resize(size_t(rows * width_));
        std::fill_n(totals_.data(), rows * width_, 0.0f);
        std::fill_n(mass_, rows * kLanes, 0.0f);
        keys_.resize(size_t(kTile * depth_));
        values_.resize(size_t(kTile * width_));
    }

    // Keys and values of positions [seen, stop); those from `first` to `first + kTile` that are not among them are zeros.
    void read(const Cache<bf16> &cache, int64_t first, int64_t seen, int64_t stop) {
        const bf16 *keys[kTile] = {}, *values[kTile] = {};
        cache.find(keys + (seen - first), values + (seen - first), seen, stop);
        for (int64_t k = 0; k < depth_; k += kDepth) {
            int64_t left = dim_ - k;
            __mmask32 some = left >= kDepth ? ~0u : (1u << left) - 1;
            for (int64_t index = 0; index < kTile; index += kRows) {
                Vec rows[kRows];
                for (int row = 0; row < kRows; row++) {
                    const bf16 *key = keys[index + row];
                    rows[row] = key ? (Vec)_mm512_maskz_loadu_epi16(some, key + k) : Vec{};
                }
                transpose(rows);
                bf16 *to = keys_.data() + k * kTile + index / kRows * kTileSize;
                for (int row = 0; row < kRows; row++) std::memcpy(to + row * kDepth, &rows[row], sizeof(Vec));
            }
        }
        for (int64_t index = 0; index < kTile; index += 2)
            for (int64_t d = 0; d < width_; d += kLanes) {
                int count = int(std::min<int64_t>(dim_ - d, kLanes));
                auto of = [&](const bf16 *value) { return value ? (UintVec)load_some(value + d, count) : UintVec{}; };
                UintVec pair = of(values[index]) >> 16 | of(values[index + 1]);
                std::memcpy(values_.data() + index * width_ + d * 2, &pair, sizeof pair);
            }
    }

    // 16 pairs from `row` on. products: theirs with the keys from `first` on; steps: of kDepth keys, those that anybody
    // sees.
    void attend_rows(const Scores &scores, float *products, int64_t row, int64_t first, int64_t origin, int64_t steps) {
        Vec tops[kRows];
        bool all_seen = first + kTile <= position_[row] + 1 && first >= oldest_[row + kRows - 1];
        if (all_seen && !scores.slopes && scores.softcap <= 0.0f) {
            for (int r = 0; r < kRows; r++)
                for (int v = 0; v < kVectorsOfKeys; v++) {
                    float *at = products + r * kTile + v * kLanes;
                    Vec score = load(at) * scores.scale;
                    store(at, score);
                    tops[r] = v ? max(tops[r], score) : score;
                }
        } else {
            for (int r = 0; r < kRows; r++) tops[r] = score_row(scores, products + r * kTile, row + r, first, origin);
        }
        // A lane per pair.
        transpose(tops);
        Vec before = load(highest_ + row), top = before;
        for (int lane = 0; lane < kLanes; lane++) top = max(top, tops[lane]);
        store(highest_ + row, top);
        // A pair that has seen no key yet keeps weights of zero.
        Vec reference = select(top == splat(-__builtin_inff()), splat(0.0f), top);
        float references[kLanes], corrections[kLanes];
        store(references, reference);
        store(corrections, exp(before - reference));
        for (int r = 0; r < kRows; r++) {
            Vec weights[kVectorsOfKeys];
            for (int v = 0; v < kVectorsOfKeys; v++)
                weights[v] = exp(load(products + r * kTile + v * kLanes) - references[r]);
            Vec total = (weights[0] + weights[1]) + (weights[2] + weights[3]);
            for (int v = 0; v < kVectorsOfKeys; v++) store(weights_ + r * kTile + v * kLanes, weights[v]);
            float *mass = mass_ + (row + r) * kLanes;
            store(mass, load(mass) * corrections[r] + total);
            if (corrections[r] == 1.0f) continue;
            float *totals = totals_.data() + (row + r) * width_;
            for (int64_t d = 0; d < width_; d += kLanes) store(totals + d, load(totals + d) * corrections[r]);
        }
        for (int64_t d = 0; d < width_; d += 4 * kRows)
            multiply_values(totals_.data() + row * width_ + d, values_.data() + d * 2, steps,
                            int(std::min<int64_t>(4, (width_ - d) / kRows)));
    }

    // The scores of one pair in place of its products; the highest of every fourth.
    Vec score_row(const Scores &scores, float *products, int64_t row, int64_t first, int64_t origin) const {
        const Vec lanes = lane_numbers();
        Vec top;
        for (int v = 0; v < kVectorsOfKeys; v++) {
            Vec score = capped(scores, load(products + v * kLanes));
            Vec key = lanes + float(first + v * kLanes);
            if (scores.slopes) score += alibi<bf16>(scores, splat(slope_[row]), key - float(origin));
            IntVec hidden = (key > float(position_[row])) | (key < float(oldest_[row]));
            score = select(hidden, splat(-__builtin_inff()), score);
            store(products + v * kLanes, score);
            top = v ? max(top, score) : score;
        }
        return top;
    }

    // products: [16][kTile], of 16 pairs from `row` on with all keys.
    void multiply_keys(float *products, int64_t row) {
        const bf16 *queries = queries_.data() + row * depth_;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        const bf16 *keys = keys_.data();
        for (int64_t k = 0; k < depth_; k += kDepth, keys += 4 * kTileSize) {
            _tile_loadd(4, queries + k, depth_ * 2);
            _tile_loadd(6, keys, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, keys + kTileSize, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(6, keys + 2 * kTileSize, 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, keys + 3 * kTileSize, 64);
            _tile_dpbf16ps(3, 4, 7);
        }
        _tile_stored(0, products, kTile * 4);
        _tile_stored(1, products + 16, kTile * 4);
        _tile_stored(2, products + 32, kTile * 4);
        _tile_stored(3, products + 48, kTile * 4);
    }

    // totals += weights_ by values: `tiles` of 16 columns, 4 at most.
    void multiply_values(float *totals, const bf16 *values, int64_t steps, int tiles) {
        int64_t bytes = width_ * 4;
        _tile_loadd(0, totals, bytes);
        if (tiles > 1) _tile_loadd(1, totals + 16, bytes);
        if (tiles > 2) _tile_loadd(2, totals + 32, bytes);
        if (tiles > 3) _tile_loadd(3, totals + 48, bytes);
        for (int64_t step = 0; step < steps; step++, values += kDepth * width_) {
            _tile_loadd(4, weights_ + step * kDepth, kTile * 2);
            _tile_loadd(6, values, bytes);
            _tile_dpbf16ps(0, 4, 6);
            if (tiles > 1) {
                _tile_loadd(7, values + 32, bytes);
                _tile_dpbf16ps(1, 4, 7);
            }
            if (tiles > 2) {
                _tile_loadd(6, values + 64, bytes);
                _tile_dpbf16ps(2, 4, 6);
            }
            if (tiles > 3) {
                _tile_loadd(7, values + 96, bytes);
                _tile_dpbf16ps(3, 4, 7);
            }
        }
        _tile_stored(0, totals, bytes);
        if (tiles > 1) _tile_stored(1, totals + 16, bytes);
        if (tiles > 2) _tile_stored(2, totals + 32, bytes);
        if (tiles > 3) _tile_stored(3, totals + 48, bytes);
    }

    bool is_configured_ = false;
    int64_t dim_ = 0, depth_ = 0, width_ = 0;  // of a head: its own, padded for the scores, padded for the sums
    // Of all pairs of a call.
    Lines<bf16> queries_;                        // [rows][depth]
    Lines<float> totals_;                        // [rows][width]
    alignas(64) float mass_[kPairs * kLanes];    // a sum for each lane
    alignas(64) float highest_[kPairs];
    float slope_[kPairs];
    int32_t position_[kPairs], oldest_[kPairs];  // its own, and the first that it sees
    // Of kTile keys.
    Lines<bf16> keys_;                           // [depth / 32][kTile / 16][16][16][2]: tiles of pairs of dimensions
    Lines<bf16> values_;                         // [kTile / 2][width][2]
    // Of 16 pairs by kTile keys.
    alignas(64) float scores_[2][kRows * kTile];
    alignas(64) bf16 weights_[kRows * kTile];
};

}  // namespace graft
#endif
