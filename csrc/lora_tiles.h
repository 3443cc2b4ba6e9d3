// Low-rank updates of segments of many bfloat16 rows, by tile multiplication.
//
// Tiles multiply bfloat16 numbers, exactly, and add in float32. A float32 number is the sum of two of them, high and low,
// up to 2^-17 of it; what is lost by leaving low times low out is no more. So with
//   shrunk = x A_high + x A_low                                (without the second where A is bfloat16)
//   out   += [shrunk_high, shrunk_low, shrunk_high] [B_high; B_high; B_low]            (without the third)
// an update has nearly the accuracy of float32 at a multiple of its speed.
#pragma once

#include <memory>
#include <vector>

#include "lora.h"
#include "panels.h"

#if defined(__AMX_BF16__)
namespace graft {

class TiledUpdates {
  public:
    // Fewer rows are not worth bringing the matrices into the tiles' order.
    static bool takes(const Segment &segment) { return segment.stop - segment.start >= 16; }

    // depth: columns of x. width: of out.
    TiledUpdates(int64_t depth, int64_t width) : depth_(depth), width_(width) {}

    void add(const Segment &segment) {
        const Update &update = *segment.update;
        Part part{segment, update.dtype == 0, 0, 0, 0, {}};
        part.shrink = reserve(round_up(update.rank, kPanel) * padded() * (part.is_wide ? 2 : 1));
        for (int64_t e = 0; e < update.num_expands; e++) {
            const Expand &expand = update.expands()[e];
            int64_t deep = round_up((expand.rank_stop - expand.rank_start) * (part.is_wide ? 3 : 2), kDepth);
            int64_t columns = expand.out_stop - expand.out_start;
            part.expands.push_back({part.row_width, deep, reserve(round_up(columns, kPanel) * deep)});
            part.row_width += deep;
            for (int64_t panel = 0; panel * kPanel < columns; panel++) packs_.push_back({parts_.size(), e, panel});
        }
        for (int64_t panel = 0; panel * kPanel < update.rank; panel++) packs_.push_back({parts_.size(), -1, panel});
        part.rows = reserve((segment.stop - segment.start) * part.row_width);
        for (int64_t row = segment.start; row < segment.stop; row += kRows) {
            shrinks_.push_back({parts_.size(), row, 0});
            for (int64_t column = 0; column < width_; column += kColumns) expands_.push_back({parts_.size(), row, column});
        }
        parts_.push_back(part);
    }

    bool empty() const { return parts_.empty(); }

    // Called by all threads of a team; afterwards the memory is theirs.
    template <typename O> void compute(O *out, const bf16 *x, int64_t x_stride, int64_t out_stride) {
#pragma omp single
        memory_.reset(new bf16[size_t(size_)]);
#pragma omp for schedule(static)
        for (size_t index = 0; index < packs_.size(); index++) pack(packs_[index]);
        Scratch scratch;
#pragma omp for schedule(static)
        for (size_t index = 0; index < shrinks_.size(); index++) shrink(scratch, shrinks_[index], x, x_stride);
#pragma omp for schedule(static)
        for (size_t index = 0; index < expands_.size(); index++) expand(scratch, expands_[index], out, out_stride);
        if (!shrinks_.empty()) _tile_release();
    }

  private:
    static constexpr int64_t kRows = 32;
    static constexpr int64_t kColumns = 256;

    // One expand: where its factors begin in a shrunk row, how many there are, and its panels.
    struct PackedExpand {
        int64_t row_start, depth, panels;
    };
    // One segment. shrink, rows: places in memory. row_width: of a shrunk row, split as above for every expand.
    struct Part {
        Segment segment;
        bool is_wide;
        int64_t shrink, rows, row_width;
        std::vector<PackedExpand> expands;
    };
    // expand: -1 for the shrink.
    struct PackItem {
        size_t part;
        int64_t expand, panel;
    };
    struct Item {
        size_t part;
        int64_t row, column;
    };
    struct Scratch {
        std::vector<bf16> x;
        std::vector<float> shrunk;
        int height = 0;  // that the tiles are configured for
    };

    int64_t padded() const { return round_up(depth_, kDepth); }

    int64_t reserve(int64_t count) {
        int64_t start = size_;
        size_ += round_up(count, 32);
        return start;
    }

    // Two rows of a panel side by side, from bits that are in the lower half.
    static void put(bf16 *panel, int64_t k, UintVec even, UintVec odd) {
        UintVec pair = even | odd << 16;
        std::memcpy(panel + k * kPanel, &pair, sizeof pair);
    }

    static UintVec low_bits(Vec value) { return rounded_bits(value - rounded<bf16>(value)); }

    void pack(const PackItem &item) {
        if (parts_[item.part].is_wide)
            pack_as<float>(item);
        else
            pack_as<bf16>(item);
    }

    template <typename M> void pack_as(const PackItem &item) {
        const Part &part = parts_[item.part];
        const Update &update = *part.segment.update;
        int64_t column = item.panel * kPanel;
        if (item.expand < 0) {
            const M *matrix = (const M *)update.shrink + column;
            int count = int(std::min<int64_t>(update.rank - column, kPanel));
            auto row = [=](int64_t k) { return k < depth_ ? load_some(matrix + k * update.stride, count) : Vec{}; };
            bf16 *high = memory_.get() + part.shrink + column * padded();
            bf16 *low = high + round_up(update.rank, kPanel) * padded();
            for (int64_t k = 0; k < padded(); k += 2) {
                Vec even = row(k), odd = row(k + 1);
                put(high, k, rounded_bits(even), rounded_bits(odd));
                if (part.is_wide) put(low, k, low_bits(even), low_bits(odd));
            }
            return;
        }
        const Expand &expand = update.expands()[item.expand];
        const PackedExpand &packed = part.expands[size_t(item.expand)];
        int64_t rank = expand.rank_stop - expand.rank_start;
        const M *matrix = (const M *)expand.matrix + column;
        int count = int(std::min<int64_t>(expand.out_stop - expand.out_start - column, kPanel));
        auto row = [=](int64_t k) {
            if (k >= rank * (part.is_wide ? 3 : 2)) return UintVec{};
            Vec value = load_some(matrix + k % rank * expand.stride, count);
            return k < 2 * rank ? rounded_bits(value) : low_bits(value);
        };
        bf16 *panel = memory_.get() + packed.panels + column * packed.depth;
        for (int64_t k = 0; k < packed.depth; k += 2) put(panel, k, row(k), row(k + 1));
    }

    static int height_at(const Part &part, int64_t row) { return int(std::min(kRows, part.segment.stop - row)); }

    static void configure_for(Scratch &scratch, int height) {
        if (scratch.height != height) configure(std::min(height, 16), std::max(height - 16, 0));
        scratch.height = height;
    }

    // use(row, panel, sums) for the tiles of rows by `count` panels, of which `panels` is the first.
    template <typename Sum, typename Use>
    static void each_tile(int height, int64_t count, const Sum &sum, const Use &use) {
        alignas(64) float sums[16 * kPanel];
        for (int64_t panel = 0; panel < count; panel += 2) {
            bool two = panel + 1 < count;
            sum(panel, two);
            _tile_stored(0, sums, 64);
            use(0, panel, sums);
            if (two) {
                _tile_stored(1, sums, 64);
                use(0, panel + 1, sums);
            }
            if (height <= 16) continue;
            _tile_stored(2, sums, 64);
            use(16, panel, sums);
            if (two) {
                _tile_stored(3, sums, 64);
                use(16, panel + 1, sums);
            }
        }
    }

    void shrink(Scratch &scratch, const Item &item, const bf16 *x, int64_t x_stride) {
        const Part &part = parts_[item.part];
        const Update &update = *part.segment.update;
        int height = height_at(part, item.row);
        const bf16 *rows = x + item.row * x_stride;
        if (padded() != depth_) {
            rows = prepared(scratch.x, rows, height, depth_, padded(), x_stride);
            x_stride = padded();
        }
        int64_t width = round_up(update.rank, kPanel);
        scratch.shrunk.resize(size_t(kRows * width));
        configure_for(scratch, height);
        const bf16 *high = memory_.get() + part.shrink;
        each_tile(
            height, width / kPanel,
            [&](int64_t panel, bool two) {
                const bf16 *bottom = rows + 16 * x_stride, *first = high + panel * kPanel * padded();
                zero_tiles(height > 16);
                for (int half = 0; half < (part.is_wide ? 2 : 1); half++, first += width * padded())
                    add_tiles(rows, bottom, x_stride * 2, first, first + padded() * kPanel, padded(), two, height > 16);
            },
            [&](int row, int64_t panel, const float *sums) {
                for (int r = row; r < std::min(row + 16, height); r++)
                    store(scratch.shrunk.data() + r * width + panel * kPanel, load(sums + (r - row) * kPanel));
            });
        for (int64_t e = 0; e < update.num_expands; e++) {
            const Expand &expand = update.expands()[e];
            const PackedExpand &packed = part.expands[size_t(e)];
            int64_t rank = expand.rank_stop - expand.rank_start;
            for (int r = 0; r < height; r++) {
                const float *from = scratch.shrunk.data() + r * width + expand.rank_start;
                int64_t row = item.row - part.segment.start + r;
                bf16 *to = memory_.get() + part.rows + row * part.row_width + packed.row_start;
                std::memset(to, 0, size_t(packed.depth) * sizeof(bf16));
                for (int64_t k = 0; k < rank; k += kLanes) {
                    int count = int(std::min<int64_t>(rank - k, kLanes));
                    Vec value = load_some(from + k, count);
                    store_some(to + k, value, count);
                    store_some(to + rank + k, value - rounded<bf16>(value), count);
                    if (part.is_wide) store_some(to + 2 * rank + k, value, count);
                }
            }
        }
    }

    template <typename O> void expand(Scratch &scratch, const Item &item, O *out, int64_t out_stride) {
        const Part &part = parts_[item.part];
        const Update &update = *part.segment.update;
        int height = height_at(part, item.row);
        configure_for(scratch, height);
        const bf16 *top = memory_.get() + part.rows + (item.row - part.segment.start) * part.row_width;
        for (int64_t e = 0; e < update.num_expands; e++) {
            const Expand &expand = update.expands()[e];
            const PackedExpand &packed = part.expands[size_t(e)];
            // Panels that begin in the item's columns, counted from where the expand begins. Two expands of the same
            // columns begin at the same one, so no other item adds to these.
            int64_t first = (std::max<int64_t>(item.column - expand.out_start, 0) + kPanel - 1) / kPanel;
            int64_t columns = std::min(item.column + kColumns, expand.out_stop) - expand.out_start;
            int64_t last = columns <= 0 ? 0 : (columns + kPanel - 1) / kPanel;
            const bf16 *rows = top + packed.row_start, *bottom = rows + 16 * part.row_width;
            const bf16 *panels = memory_.get() + packed.panels + first * kPanel * packed.depth;
            each_tile(
                height, last - first,
                [&](int64_t panel, bool two) {
                    const bf16 *at = panels + panel * kPanel * packed.depth;
                    zero_tiles(height > 16);
                    add_tiles(rows, bottom, part.row_width * 2, at, at + packed.depth * kPanel, packed.depth, two,
                              height > 16);
                },
                [&](int row, int64_t panel, const float *sums) {
                    int64_t column = expand.out_start + (first + panel) * kPanel;
                    int count = int(std::min<int64_t>(expand.out_stop - column, kPanel));
                    for (int r = row; r < std::min(row + 16, height); r++) {
                        O *to = out + (item.row + r) * out_stride + column;
                        store_some(to, load_some(to, count) + load(sums + (r - row) * kPanel), count);
                    }
                });
        }
    }

    int64_t depth_, width_, size_ = 0;
    std::vector<Part> parts_;
    std::vector<PackItem> packs_;
    std::vector<Item> shrinks_, expands_;
    std::unique_ptr<bf16[]> memory_;
};

}  // namespace graft
#endif
