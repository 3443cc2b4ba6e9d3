// y = x W^T + b for weights that are kept as codes of four or eight bits, with a scale for each group of a row's columns:
//   w[n, k] = (value(code[n, k]) - zero[n, g]) * scale[n, g] * factor + minimum[n, g], g the group of column k
//
// Few rows: panels are decoded to float32 or bfloat16 a few columns at a time, without their scales, and multiplied as
// dense ones are. A scale is applied in float32 to the sum over its piece, at most kPieceColumns of one group; zero and
// minimum to the sum of x over it.
// Many rows, or small groups: a panel is decoded once, scales and all, and all rows are multiplied with it as with a
// dense one.
// In either way sums have one order for any number of rows. A matrix that is multiplied `by_row` always takes the same
// way: a row's result does not depend on its neighbours.
#include "coded_matrix.h"
#include "graft.h"
#include "turned_product.h"

namespace graft {
namespace {

constexpr int64_t kTogether = 4;         // panels that are decoded together
constexpr int64_t kPieceColumns = 128;   // columns that are summed before their scale is applied, at most
constexpr int64_t kFewRows = 16;         // up to here a scale is cheaper applied to a sum than to what is summed
constexpr int64_t kSmallGroup = 16;      // for these never
constexpr int64_t kManyBytes = 512 << 10;  // of decoded panels, in the second-level cache

// ---- codes

// Eight codes of four bits, one to a byte, as they lie side by side.
uint32_t joined_nibbles(const uint8_t *codes) {
    auto every_other = [](uint64_t bytes) {
        bytes &= 0x000f000f000f000fu;
        bytes = (bytes | bytes >> 12) & 0x000000ff000000ffu;
        return uint32_t((bytes | bytes >> 24) & 0xffffu);
    };
    uint64_t bytes;
    std::memcpy(&bytes, codes, sizeof bytes);
    return every_other(bytes) | every_other(bytes >> 8) << 16;
}

// One row of a panel whose bytes are zero.
void pack_row(uint8_t *panel, const uint8_t *codes, int64_t lane, int bits, int64_t columns) {
    int64_t k = 0;
    if (bits == 4)
        for (; k + 8 <= columns; k += 8) {
            uint32_t joined = joined_nibbles(codes + k);
            std::memcpy(panel + place(lane, k, bits).byte, &joined, sizeof joined);
        }
    else
        for (; k + 2 <= columns; k += 2) std::memcpy(panel + place(lane, k, bits).byte, codes + k, 2);
    for (; k < columns; k++) {
        Place at = place(lane, k, bits);
        panel[at.byte] |= uint8_t(codes[k] << at.shift);
    }
}

void pack(uint8_t *packed, const uint8_t *codes, int bits, int64_t rows, int64_t columns, int threads) {
    int64_t size = panel_bytes(columns, bits);
    parallel((rows + kPanel - 1) / kPanel, threads, [=](int64_t start, int64_t stop) {
        for (int64_t panel = start; panel < stop; panel++) {
            std::memset(packed + panel * size, 0, size_t(size));
            for (int64_t lane = 0; lane < std::min<int64_t>(kPanel, rows - panel * kPanel); lane++)
                pack_row(packed + panel * size, codes + (panel * kPanel + lane) * columns, lane, bits, columns);
        }
    });
}

// ---- the product of few rows

// Columns of one group that are summed before their scale is applied.
struct Piece {
    int64_t start, columns, group;
};

std::vector<Piece> cut(int64_t columns, int64_t group_size) {
    std::vector<Piece> pieces;
    for (int64_t start = 0; start < columns; start += pieces.back().columns) {
        int64_t group = start / group_size, stop = std::min((group + 1) * group_size, columns);
        pieces.push_back({start, std::min(stop - start, kPieceColumns), group});
    }
    return pieces;
}

template <typename T> struct CodedProduct {
    using W = typename Work<T>::Type;

    const CodedMatrix &matrix;
    Output<T> output;
    const W *x;
    int64_t x_stride, rows;
    std::vector<Piece> pieces;
    std::vector<float> x_sums;  // [rows][pieces], where the matrix has zeros or minima
    int64_t capacity;           // decoded columns of a panel that are held at once
    int64_t depth;              // columns that are multiplied at once: a tile's, or half of it for groups of as many

    // Columns that a piece takes once decoded.
    int64_t decoded(const Piece &piece) const { return round_up(piece.columns, depth); }
    bool shifted() const { return matrix.zero || matrix.minimum.data; }
};

// Some pieces of up to kTogether panels, decoded, and sums for the rows of a block.
template <typename T> class Decoded {
  public:
    using W = typename Work<T>::Type;

    explicit Decoded(const CodedProduct<T> &product)
        : product_(product),
          numbers_(product.matrix),
          panels_(size_t(kTogether * product.capacity * kPanel)),
          scales_(kTogether * product.pieces.size() * kPanel),
          shifts_(product.shifted() ? scales_.size() : 0),
          totals_(size_t(std::min(product.rows, kRowBlock) * kTogether * kPanel)) {}

    // All rows of the block, with panels [start, stop).
    void multiply_block(int64_t row, int64_t row_stop, int64_t start, int64_t stop) {
        std::fill_n(totals_.data(), totals_.size(), 0.0f);
        row_ = row, panel_ = start, count_ = stop - start;
        size_t done = 0;
        while (done < product_.pieces.size()) {
            first_ = done;
            int64_t held = 0;
            while (done < product_.pieces.size() &&
                   held + product_.decoded(product_.pieces[done]) <= product_.capacity)
                held += product_.decoded(product_.pieces[done++]);
            last_ = done;
            decode();
            multiply_rows(row_stop);
        }
        for (int64_t r = row; r < row_stop; r++)
            for (int64_t p = 0; p < count_; p++)
                for (int v = 0; v < kVectors; v++)
                    product_.output.finish(r, (panel_ + p) * kPanel + v * kLanes, load(total(r, p) + v * kLanes));
    }

  private:
    W *panel(int64_t p) { return panels_.data() + p * product_.capacity * kPanel; }
    float *total(int64_t row, int64_t p) { return totals_.data() + ((row - row_) * kTogether + p) * kPanel; }
    int64_t value_index(int64_t p, size_t piece) const {
        return (p * int64_t(product_.pieces.size()) + int64_t(piece)) * kPanel;
    }

    void decode() {
        for (int64_t p = 0; p < count_; p++) {
            W *to = panel(p);
            for (size_t index = first_; index < last_; index++) {
                const Piece &piece = product_.pieces[index];
                decode_piece(to, p, piece);
                decode_values(p, index);
                to += product_.decoded(piece) * kPanel;
            }
        }
    }

    void decode_piece(W *to, int64_t p, const Piece &piece) {
        int64_t unit = unit_columns(product_.matrix.bits), units = (piece.columns + unit - 1) / unit;
        numbers_.read(to, panel_ + p, piece.start, units);
        int64_t missing = product_.decoded(piece) - units * unit;
        std::memset(to + units * unit * kPanel, 0, size_t(missing * kPanel) * sizeof(W));
    }

    void decode_values(int64_t p, size_t index) {
        for (int v = 0; v < kVectors; v++) {
            GroupNumbers numbers = group_numbers(product_.matrix, panel_ + p, product_.pieces[index].group, v);
            int64_t at = value_index(p, index) + v * kLanes;
            store(scales_.data() + at, numbers.scale);
            if (product_.shifted()) store(shifts_.data() + at, numbers.shift);
        }
    }

    // Takes a piece's sums into the totals.
    void add(int64_t row, int64_t p, size_t index, int v, Vec sum) {
        int64_t at = value_index(p, index) + v * kLanes;
        float *to = total(row, p) + v * kLanes;
        Vec value = load(to);
        value += sum * load(scales_.data() + at);
        if (product_.shifted())
            value += load(shifts_.data() + at) * product_.x_sums[size_t(row) * product_.pieces.size() + index];
        store(to, value);
    }

    // R rows by P panels.
    template <int R, int P> void multiply_tile(int64_t row, int64_t p) {
        constexpr int kStep = sizeof(W) == 2 ? 2 : 1;
        const W *decoded = panel(p);
        int64_t size = product_.capacity * kPanel;
        for (size_t index = first_; index < last_; index++) {
            const Piece &piece = product_.pieces[index];
            const W *x = product_.x + row * product_.x_stride + piece.start;
            Vec sums[P][R][kVectors] = {};
            for (int64_t k = 0; k < piece.columns; k += kStep)
                for (int q = 0; q < P; q++)
                    multiply(sums[q], decoded + q * size + k * kPanel, x + k, product_.x_stride);
            for (int q = 0; q < P; q++)
                for (int r = 0; r < R; r++)
                    for (int v = 0; v < kVectors; v++) add(row + r, p + q, index, v, sums[q][r][v]);
            decoded += product_.decoded(piece) * kPanel;
        }
    }

    // As many panels beside each other as the registers hold for R rows.
    template <int R> void multiply_panels(int64_t row) {
        constexpr int kAccumulators = kLanes == 16 ? 24 : 12;
        constexpr int kWanted = kAccumulators / (R * kVectors);
        constexpr int P = kWanted >= 4 ? 4 : kWanted >= 2 ? 2 : 1;
        int64_t p = 0;
        for (; p + P <= count_; p += P) multiply_tile<R, P>(row, p);
        for (; p < count_; p++) multiply_tile<R, 1>(row, p);
    }

#if defined(__AMX_BF16__)
    void add_tile(const float *sums, int64_t row, int rows, int64_t p, size_t index) {
        int64_t at = value_index(p, index);
        Vec scale = load(scales_.data() + at);
        float *to = total(row, p);
        if (!product_.shifted()) {
            for (int r = 0; r < rows; r++, to += kTogether * kPanel)
                store(to, load(to) + load(sums + r * kPanel) * scale);
            return;
        }
        Vec shift = load(shifts_.data() + at);
        const float *x_sum = product_.x_sums.data() + size_t(row) * product_.pieces.size() + index;
        for (int r = 0; r < rows; r++, to += kTogether * kPanel, x_sum += product_.pieces.size()) {
            Vec value = load(to) + load(sums + r * kPanel) * scale;
            store(to, value + shift * *x_sum);
        }
    }

    // Up to 32 rows by up to two panels.
    void multiply_square(int64_t row, int upper, int lower, int64_t p) {
        bool two = p + 1 < count_;
        const W *first = panel(p), *second = panel(p + 1);
        int64_t bytes = product_.x_stride * 2, depth = product_.depth;
        alignas(64) float sums[4][16 * kPanel];
        for (size_t index = first_; index < last_; index++) {
            const Piece &piece = product_.pieces[index];
            const W *top = product_.x + row * product_.x_stride + piece.start, *bottom = top + 16 * product_.x_stride;
            zero_tiles(lower > 0);
            for (int64_t k = 0; k < piece.columns; k += depth)
                add_tile_products(top + k, bottom + k, bytes, first + k * kPanel, second + k * kPanel, two, lower > 0);
            _tile_stored(0, sums[0], 64);
            if (two) _tile_stored(1, sums[1], 64);
            if (lower) _tile_stored(2, sums[2], 64);
            if (lower && two) _tile_stored(3, sums[3], 64);
            add_tile(sums[0], row, upper, p, index);
            if (two) add_tile(sums[1], row, upper, p + 1, index);
            if (lower) add_tile(sums[2], row + 16, lower, p, index);
            if (lower && two) add_tile(sums[3], row + 16, lower, p + 1, index);
            first += product_.decoded(piece) * kPanel;
            second += product_.decoded(piece) * kPanel;
        }
    }

    // Up to 16 rows by four panels, so that one sum's latency hides another's.
    void multiply_wide(int64_t row, int height) {
        int64_t bytes = product_.x_stride * 2, size = product_.capacity * kPanel;
        const W *decoded = panel(0);
        alignas(64) float sums[kTogether][16 * kPanel];
        for (size_t index = first_; index < last_; index++) {
            const Piece &piece = product_.pieces[index];
            const W *x = product_.x + row * product_.x_stride + piece.start;
            zero_tiles(true);
            for (int64_t k = 0; k < piece.columns; k += product_.depth) {
                const W *from = decoded + k * kPanel;
                _tile_loadd(4, x + k, bytes);
                _tile_loadd(5, from, 64);
                _tile_dpbf16ps(0, 4, 5);
                _tile_loadd(6, from + size, 64);
                _tile_dpbf16ps(1, 4, 6);
                _tile_loadd(7, from + 2 * size, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_loadd(5, from + 3 * size, 64);
                _tile_dpbf16ps(3, 4, 5);
            }
            _tile_stored(0, sums[0], 64);
            _tile_stored(1, sums[1], 64);
            _tile_stored(2, sums[2], 64);
            _tile_stored(3, sums[3], 64);
            for (int64_t p = 0; p < kTogether; p++) add_tile(sums[p], row, height, p, index);
            decoded += product_.decoded(piece) * kPanel;
        }
    }

    void multiply_rows(int64_t row_stop) {
        if constexpr (sizeof(W) == 2) {
            for (int64_t row = row_; row < row_stop; row += 32) {
                int height = int(std::min<int64_t>(32, row_stop - row));
                bool is_wide = height <= 16 && count_ == kTogether;
                int shape = is_wide ? -height : height;
                int upper = std::min(height, 16), lower = height - upper;
                if (shape != configured_) {
                    int depth = int(product_.depth), pairs = depth / 2;
                    if (is_wide)
                        configure({height, height, height, height, height, pairs, pairs, pairs}, depth, {4});
                    else
                        configure({upper, upper, lower, lower, upper, lower, pairs, pairs}, depth, {4, 5});
                }
                configured_ = shape;
                if (is_wide)
                    multiply_wide(row, height);
                else
                    for (int64_t p = 0; p < count_; p += 2) multiply_square(row, upper, lower, p);
            }
        } else {
            multiply_in_vectors(row_stop);
        }
    }

  public:
    ~Decoded() {
        if (configured_) _tile_release();
    }

  private:
    int configured_ = 0;
#else
    void multiply_rows(int64_t row_stop) { multiply_in_vectors(row_stop); }
#endif

    void multiply_in_vectors(int64_t row_stop) {
        constexpr int kRows = kLanes == 16 ? 8 : kLanes == 8 ? 4 : 2;
        int64_t row = row_;
        for (; row + kRows <= row_stop; row += kRows) multiply_panels<kRows>(row);
        for (; row + 4 <= row_stop; row += 4) multiply_panels<4>(row);
        for (; row + 2 <= row_stop; row += 2) multiply_panels<2>(row);
        for (; row < row_stop; row++) multiply_panels<1>(row);
    }

    const CodedProduct<T> &product_;
    Numbers<W> numbers_;
    Lines<W> panels_;      // [kTogether][capacity][16]
    Lines<float> scales_;  // [kTogether][pieces][16]
    Lines<float> shifts_;
    Lines<float> totals_;  // [rows][kTogether][16]
    int64_t row_ = 0, panel_ = 0, count_ = 0;
    size_t first_ = 0, last_ = 0;
};

template <typename T> std::vector<float> sums_of_pieces(const CodedProduct<T> &product) {
    std::vector<float> sums;
    sums.reserve(size_t(product.rows) * product.pieces.size());
    for (int64_t row = 0; row < product.rows; row++)
        for (const Piece &piece : product.pieces) {
            const auto *x = product.x + row * product.x_stride + piece.start;
            Vec total{};
            for (int64_t k = 0; k < piece.columns; k += kLanes)
                total += load_some(x + k, int(std::min<int64_t>(kLanes, piece.columns - k)));
            sums.push_back(sum(total));
        }
    return sums;
}

template <typename T>
void multiply_pieces(const CodedMatrix &matrix, T *out, const T *x, const T *bias, int64_t rows, int64_t x_stride,
                     int64_t out_stride, int threads) {
    using W = typename Work<T>::Type;
    int64_t tile = matrix.group_size == kDepth / 2 ? kDepth / 2 : kDepth;
    CodedProduct<T> product{matrix, {out, bias, matrix.rows, out_stride}, nullptr, x_stride, rows,
                            cut(matrix.columns, matrix.group_size), {}, 0, sizeof(W) == 2 ? tile : 8};
    // What is read of a row of x, and how much is decoded of a panel.
    int64_t depth = matrix.columns, whole = 0;
    for (const Piece &piece : product.pieces) {
        if (sizeof(W) == 2) depth = std::max(depth, piece.start + product.decoded(piece));
        whole += product.decoded(piece);
    }
    std::vector<W> scratch;
    product.x = readable(scratch, x, rows, matrix.columns, depth, product.x_stride);
    if (product.shifted()) product.x_sums = sums_of_pieces(product);
    // Few rows pass but once over what is decoded: it stays in the first-level cache.
    int64_t held = rows <= kFewRows ? kPieceColumns : kManyBytes / int64_t(kTogether * kPanel * sizeof(W));
    product.capacity = std::min(whole, held);
    int64_t panels = (matrix.rows + kPanel - 1) / kPanel;
    parallel((panels + kTogether - 1) / kTogether, threads_for(rows * matrix.rows * matrix.columns, threads),
             [&](int64_t start, int64_t stop) {
                 Decoded<T> decoded(product);
                 for (int64_t row = 0; row < rows; row += kRowBlock)
                     for (int64_t group = start; group < stop; group++)
                         decoded.multiply_block(row, std::min(rows, row + kRowBlock), group * kTogether,
                                                std::min(panels, (group + 1) * kTogether));
             });
}

// ---- columns

// Columns of W as they are stored, but for their order.
struct CodedColumns {
    const CodedMatrix &matrix;
    int64_t rows, columns;
    Numbers<float> numbers;

    explicit CodedColumns(const CodedMatrix &of) : matrix(of), rows(of.rows), columns(of.columns), numbers(of) {}

    // As `multiply_turned` wants it; `start` a multiple of what lies together.
    const float *read(int64_t panel, int64_t start, int64_t count, float *scratch) const {
        int64_t unit = unit_columns(matrix.bits), there = std::min(count, columns - start);
        numbers.read(scratch, panel, start, (there + unit - 1) / unit);
        for (int64_t k = 0; k < there;) {
            int64_t group = (start + k) / matrix.group_size;
            int64_t stop = std::min(there, (group + 1) * matrix.group_size - start);
            for (int v = 0; v < kVectors; v++) scale_columns(scratch + v * kLanes, k, stop, panel, group, v);
            k = stop;
        }
        std::memset(scratch + there * kPanel, 0, size_t((count - there) * kPanel) * sizeof(float));
        return scratch;
    }

    // One row. to: float32 [columns].
    void read_row(float *to, int64_t row) const {
        int64_t panel = row / kPanel, lane = row % kPanel;
        const uint8_t *codes = place_of(matrix, panel, 0);
        for (int64_t start = 0; start < columns; start += matrix.group_size) {
            int64_t group = start / matrix.group_size, stop = std::min(columns, start + matrix.group_size);
            float scale = scale_at(panel, group, int(lane / kLanes))[lane % kLanes];
            float zero = matrix.zero ? float(matrix.zero[(panel * groups() + group) * kPanel + lane]) : 0.0f;
            for (int64_t k = start; k < stop; k++) {
                Place at = place(lane, k, matrix.bits);
                uint8_t code = codes[at.byte] >> at.shift & (matrix.bits == 8 ? 255 : 15);
                float number = matrix.table ? matrix.table[code] : float(int8_t(code));
                to[k] = (number - zero) * scale * matrix.factor;
            }
            if (!matrix.minimum.data) continue;
            // Apart from the multiplication, or the compiler would round once for both.
            float minimum = minimum_at(panel, group, int(lane / kLanes))[lane % kLanes];
            for (int64_t k = start; k < stop; k++) to[k] += minimum;
        }
    }

  private:
    int64_t groups() const { return (columns + matrix.group_size - 1) / matrix.group_size; }
    Vec scale_at(int64_t panel, int64_t group, int v) const {
        return value_at(matrix.scale, panel, group, groups(), rows, v);
    }
    Vec minimum_at(int64_t panel, int64_t group, int v) const {
        return value_at(matrix.minimum, panel, group, groups(), rows, v);
    }

    void scale_columns(float *to, int64_t start, int64_t stop, int64_t panel, int64_t group, int v) const {
        Vec scale = scale_at(panel, group, v), zero = splat(0.0f);
        if (matrix.zero) {
            const int8_t *from = matrix.zero + (panel * groups() + group) * kPanel + v * kLanes;
            for (int lane = 0; lane < kLanes; lane++) zero[lane] = float(from[lane]);
        }
        for (int64_t k = start; k < stop; k++)
            store(to + k * kPanel, (load(to + k * kPanel) - zero) * scale * matrix.factor);
        if (!matrix.minimum.data) return;
        // Apart from the multiplication, as above.
        Vec minimum = minimum_at(panel, group, v);
        for (int64_t k = start; k < stop; k++) store(to + k * kPanel, load(to + k * kPanel) + minimum);
    }
};

// ---- the product of many rows

// A panel, scales and all, as linear.cpp packs a dense one. depth: its columns, the last of them zeros or nothing that x
// has anything but zeros for.
inline void decode_whole(float *to, const CodedColumns &source, int64_t panel, int64_t depth) {
    source.read(panel, 0, depth, to);
}

#if defined(__AVX512BF16__)
// Two columns, side by side.
inline void store_pair(bf16 *to, Vec even, Vec odd) {
    alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512i apart = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    _mm512_storeu_si512(to, _mm512_maskz_permutexvar_epi16(~__mmask32(0), _mm512_load_si512(kOrder), apart));
}

// Of one group.
inline void decode_nibbles(bf16 *to, const uint8_t *codes, int64_t units, const Table &table, GroupNumbers numbers) {
    for (int64_t unit = 0; unit < units; unit++, codes += 64, to += 8 * kPanel) {
        __builtin_prefetch(codes + kAhead);
        UintVec words;
        std::memcpy(&words, codes, sizeof words);
        for (int pair = 0; pair < 4; pair++)
            store_pair(to + pair * 2 * kPanel, table[words >> (4 * pair)] * numbers.scale + numbers.shift,
                       table[words >> (16 + 4 * pair)] * numbers.scale + numbers.shift);
    }
}

// What is there already becomes what it is times its scale.
inline void scale_pairs(bf16 *panel, int64_t columns, GroupNumbers numbers) {
    for (int64_t k = 0; k < columns; k += 2, panel += 2 * kPanel) {
        UintVec pair;
        std::memcpy(&pair, panel, sizeof pair);
        Vec even = (Vec)(pair << 16), odd = (Vec)(pair & 0xffff0000u);
        store_pair(panel, even * numbers.scale + numbers.shift, odd * numbers.scale + numbers.shift);
    }
}

void decode_whole(bf16 *to, const Numbers<bf16> &source, int64_t panel, int64_t depth) {
    const CodedMatrix &matrix = source.matrix;
    int64_t unit = unit_columns(matrix.bits), k = 0;
    for (int64_t group = 0; k < matrix.columns; group++) {
        int64_t units = (std::min(matrix.group_size, matrix.columns - k) + unit - 1) / unit;
        GroupNumbers numbers = group_numbers(matrix, panel, group, 0);
        if (matrix.bits == 4) {
            decode_nibbles(to + k * kPanel, place_of(matrix, panel, k), units, Table(matrix.table), numbers);
        } else {
            source.read(to + k * kPanel, panel, k, units);
            scale_pairs(to + k * kPanel, units * unit, numbers);
        }
        k += units * unit;
    }
    if (k < depth) std::memset(to + k * kPanel, 0, size_t((depth - k) * kPanel) * sizeof(bf16));
}
#endif

template <typename T>
void multiply_whole(const CodedMatrix &matrix, T *out, const T *x, const T *bias, int64_t rows, int64_t x_stride,
                    int64_t out_stride, int threads) {
    using W = typename Work<T>::Type;
    using Source = std::conditional_t<sizeof(W) == 2, Numbers<W>, CodedColumns>;
    Source source(matrix);
    int64_t depth = sizeof(W) == 2 ? round_up(matrix.columns, kDepth) : matrix.columns;
    std::vector<W> scratch;
    const W *readable_x = readable(scratch, x, rows, matrix.columns, depth, x_stride);
    int64_t panels = (matrix.rows + kPanel - 1) / kPanel, size = depth * kPanel;
    int64_t together = std::clamp<int64_t>(kManyBytes / (size * int64_t(sizeof(W))), 2, kTogether);
    parallel((panels + together - 1) / together, threads_for(rows * matrix.rows * matrix.columns, threads),
             [&](int64_t start, int64_t stop) {
        // Codes are read by whole units.
        Lines<W> decoded(size_t(together * size + 8 * kPanel));
        for (int64_t first = start * together; first < std::min(panels, stop * together); first += together) {
            int64_t count = std::min(together, panels - first), column = first * kPanel;
            for (int64_t p = 0; p < count; p++) decode_whole(decoded.data() + p * size, source, first + p, depth);
            Output<T> output{out + column, bias ? bias + column : nullptr, matrix.rows - column, out_stride};
            Product<W, Output<T>> product{output, decoded.data(), rows, std::min(count * kPanel, output.columns), depth};
            multiply(product, readable_x, x_stride, 1);
        }
    });
}

template <typename T>
void coded_linear(const CodedMatrix &matrix, T *out, const T *x, const T *bias, int64_t rows, int64_t x_stride,
                  int64_t out_stride, int threads) {
    if (matrix.group_size > kSmallGroup && (rows <= kFewRows || matrix.by_row))
        multiply_pieces(matrix, out, x, bias, rows, x_stride, out_stride, threads);
    else
        multiply_whole(matrix, out, x, bias, rows, x_stride, out_stride, threads);
}

// ---- rows

// As `store_some`, but that numbers under 2^-126 stay what they are.
void store_row(float *to, Vec value, int count) { store_some(to, value, count); }
void store_row(bf16 *to, Vec value, int count) {
    HalfVec halves = __builtin_convertvector(rounded_bits(value), HalfVec);
    std::memcpy(to, &halves, size_t(std::min(count, kLanes)) * sizeof(bf16));
}

// The first `count` rows of a panel.
template <typename T>
void decode_panel(const CodedColumns &source, T *out, int64_t panel, int64_t count, float *scratch) {
    constexpr int64_t kWidth = kTurnedPanels * kPanel;
    for (int64_t column = 0; column < source.columns; column += kWidth) {
        source.read(panel, column, kWidth, scratch);
        int64_t width = std::min(kWidth, source.columns - column);
        for (int64_t k = 0; k < width; k += kLanes)
            for (int64_t row = 0; row < count; row += kLanes) {
                Vec rows[kLanes];
                for (int lane = 0; lane < kLanes; lane++) rows[lane] = load(scratch + (k + lane) * kPanel + row);
                transpose(rows);
                for (int64_t index = 0; index < std::min<int64_t>(kLanes, count - row); index++)
                    store_row(out + (row + index) * source.columns + column + k, rows[index],
                              int(std::min<int64_t>(kLanes, width - k)));
            }
    }
}

template <typename T>
void decode_rows(const CodedMatrix &matrix, T *out, const int64_t *ids, int64_t count, int threads) {
    // Fewer are not worth reading a whole panel for.
    constexpr int64_t kMany = 4;
    CodedColumns source(matrix);
    int64_t columns = matrix.columns;
    parallel((count + kPanel - 1) / kPanel, threads_for(count * columns, threads), [&](int64_t first, int64_t last) {
        Lines<float> scratch(size_t(std::max(columns + kLanes, kTurnedPanels * kPanel * kPanel)));
        for (int64_t start = first * kPanel; start < std::min(count, last * kPanel); start += kPanel) {
            int64_t some = std::min<int64_t>(kPanel, count - start);
            if (some >= kMany && is_panel(ids + start, some)) {
                decode_panel(source, out + start * columns, ids[start] / kPanel, some, scratch.data());
                continue;
            }
            for (int64_t index = start; index < start + some; index++) {
                source.read_row(scratch.data(), ids[index]);
                for (int64_t k = 0; k < columns; k += kLanes)
                    store_row(out + index * columns + k, load(scratch.data() + k),
                              int(std::min<int64_t>(kLanes, columns - k)));
            }
        }
    });
}

}  // namespace
}  // namespace graft

using namespace graft;

// Bytes that codes of a [rows, columns] matrix take when packed. bits: 4 or 8.
GRAFT_API int64_t graft_packed_code_bytes(int bits, int64_t rows, int64_t columns) {
    return round_up(rows, kPanel) / kPanel * panel_bytes(columns, bits);
}

// codes: [rows, columns], one to a byte.
GRAFT_API void graft_pack_codes(void *packed, const void *codes, int bits, int64_t rows, int64_t columns, int threads) {
    pack((uint8_t *)packed, (const uint8_t *)codes, bits, rows, columns, threads);
}

// out: [count, matrix columns], rows `ids` of the matrix, columns in the order of the codes.
GRAFT_API void graft_decode_rows(void *out, const CodedMatrix *matrix, const int64_t *ids, int dtype, int64_t count,
                                 int threads) {
    if (dtype == 0)
        decode_rows(*matrix, (float *)out, ids, count, threads);
    else
        decode_rows(*matrix, (bf16 *)out, ids, count, threads);
}

// out: [rows, matrix rows] = x [rows, matrix columns] @ W^T + bias.
GRAFT_API void graft_coded_linear(void *out, const void *x, const CodedMatrix *matrix, const void *bias, int dtype,
                                  int64_t rows, int64_t x_stride, int64_t out_stride, int threads) {
    if (dtype == 0)
        coded_linear(*matrix, (float *)out, (const float *)x, (const float *)bias, rows, x_stride, out_stride, threads);
    else
        coded_linear(*matrix, (bf16 *)out, (const bf16 *)x, (const bf16 *)bias, rows, x_stride, out_stride, threads);
}
GRAFT_RECORDABLE(graft_coded_linear)

// out: [rows, matrix columns] = y [rows, matrix rows] @ W, columns in the order of the codes.
GRAFT_API void graft_turned_coded_linear(void *out, const void *y, const CodedMatrix *matrix, int dtype, int64_t rows,
                                         int64_t y_stride, int64_t out_stride, int threads) {
    CodedColumns columns(*matrix);
    if (dtype == 0)
        multiply_turned(columns, (float *)out, (const float *)y, rows, y_stride, out_stride, threads);
    else
        multiply_turned(columns, (bf16 *)out, (const bf16 *)y, rows, y_stride, out_stride, threads);
}
