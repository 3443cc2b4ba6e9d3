// y = x W^T + b for weights that are kept as codes of four or eight bits, with a scale for each group of a row's columns:
//   w[n, k] = (value(code[n, k]) - zero[n, g]) * scale[n, g] * factor + minimum[n, g], g the group of column k
//
// Codes lie in panels of 16 rows, as linear.cpp has them:
//   four bits   [N / 16][K / 8] units of 64 bytes: 16 rows of two 16-bit words, for even and odd columns; the lowest
//               nibble of a word is the first of its four columns. A shift and one table look-up give [16][2] values.
//   eight bits  [N / 16][K / 2][16][2], signed integers or, as four bits, what a table has a number for
// Scales, zeros and minima are [N / 16][groups][16], but for those that many rows have in common.
//
// Panels are decoded to float32 or bfloat16 a few columns at a time, without their scales, and multiplied as dense ones
// are. A scale is applied in float32 to the sum over its piece, at most kPieceColumns of one group; zero and minimum to
// the sum of x over it. That order is the same for any number of rows: a row's result does not depend on its neighbours.
#include "graft.h"
#include "turned_product.h"

namespace graft {

// Numbers of a matrix, one for each row and group. types: 0 float32; 1 float16; 2 bfloat16; 3 coded, that is
// table[code] * factors[(row * groups + group + skip) / block_size] + offset with codes of eight bits; 4 shared, float32
// [some][groups], of which row n has those of `row_groups[n]`.
struct Values {
    const void *data;
    const float *table, *factors;
    const int32_t *row_groups;
    int64_t skip, block_size;
    float offset;
    int32_t type;
};

// A matrix W of [rows, columns]. bits: of a code, 4 or 8. table: what each code stands for, or null where codes are
// signed integers of eight bits. zero, minimum.data: or null.
struct CodedMatrix {
    int64_t rows, columns, group_size;
    const uint8_t *codes;
    const float *table;
    const int8_t *zero;
    Values scale, minimum;
    float factor;
    int32_t bits;
};

namespace {

constexpr int64_t kTogether = 4;         // panels that are decoded together
constexpr int64_t kPieceColumns = 128;   // columns that are summed before their scale is applied, at most
constexpr int64_t kFewRows = 32;         // up to here what is decoded at once stays in the first-level cache
constexpr int64_t kManyBytes = 512 << 10;  // of decoded panels, in the second-level cache

// ---- codes

// Columns of a panel that lie together, and their bytes.
constexpr int64_t unit_columns(int bits) { return bits == 8 ? 2 : 8; }
constexpr int64_t unit_bytes(int bits) { return bits == 8 ? 32 : 64; }

int64_t panel_bytes(int64_t columns, int bits) {
    return (columns + unit_columns(bits) - 1) / unit_columns(bits) * unit_bytes(bits);
}

// Where in its panel a code lies: the byte, and the lowest bit in it.
struct Place {
    int64_t byte;
    int shift;
};
Place place(int64_t lane, int64_t k, int bits) {
    if (bits == 8) return {k / 2 * 32 + lane * 2 + k % 2, 0};
    int64_t pair = k % 8 / 2;
    return {k / 8 * 64 + lane * 4 + k % 2 * 2 + pair / 2, int(pair % 2 * 4)};
}

void pack(uint8_t *packed, const uint8_t *codes, int bits, int64_t rows, int64_t columns, int threads) {
    int64_t size = panel_bytes(columns, bits);
    parallel((rows + kPanel - 1) / kPanel, threads, [=](int64_t start, int64_t stop) {
        for (int64_t panel = start; panel < stop; panel++) {
            uint8_t *to = packed + panel * size;
            std::memset(to, 0, size_t(size));
            for (int64_t lane = 0; lane < std::min<int64_t>(kPanel, rows - panel * kPanel); lane++) {
                const uint8_t *row = codes + (panel * kPanel + lane) * columns;
                for (int64_t k = 0; k < columns; k++) {
                    Place at = place(lane, k, bits);
                    to[at.byte] |= uint8_t(row[k] << at.shift);
                }
            }
        }
    });
}

// ---- decoding

#if defined(__AVX512F__)
struct Table {
    __m512 values;
    explicit Table(const float *from) : values(_mm512_loadu_ps(from)) {}
    // The lowest four bits of each index count.
    Vec operator[](UintVec index) const { return (Vec)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)index, values); }
};
#elif defined(__AVX2__)
struct Table {
    __m256 low, high;
    explicit Table(const float *from) : low(_mm256_loadu_ps(from)), high(_mm256_loadu_ps(from + 8)) {}
    Vec operator[](UintVec index) const {
        __m256 below = _mm256_permutevar8x32_ps(low, (__m256i)index);
        __m256 above = _mm256_permutevar8x32_ps(high, (__m256i)index);
        return (Vec)_mm256_blendv_ps(below, above, (__m256)(index << 28));
    }
};
#else
struct Table {
    const float *values;
    explicit Table(const float *from) : values(from) {}
    Vec operator[](UintVec index) const {
        Vec out;
        for (int lane = 0; lane < kLanes; lane++) out[lane] = values[index[lane] & 15];
        return out;
    }
};
#endif

const uint8_t *place_of(const CodedMatrix &matrix, int64_t panel, int64_t column) {
    return matrix.codes + panel * panel_bytes(matrix.columns, matrix.bits) +
           column / unit_columns(matrix.bits) * unit_bytes(matrix.bits);
}

// Ahead of what is read: about what memory delivers while a request for it is under way.
constexpr int64_t kAhead = 1024;

void decode_nibbles(float *to, const uint8_t *codes, int64_t units, const float *values) {
    Table table(values);
    for (int64_t unit = 0; unit < units; unit++, codes += 64, to += 8 * kPanel) {
        __builtin_prefetch(codes + kAhead);
        for (int v = 0; v < kVectors; v++) {
            UintVec words;
            std::memcpy(&words, codes + v * kLanes * 4, sizeof words);
            for (int pair = 0; pair < 4; pair++) {
                store(to + pair * 2 * kPanel + v * kLanes, table[words >> (4 * pair)]);
                store(to + (pair * 2 + 1) * kPanel + v * kLanes, table[words >> (16 + 4 * pair)]);
            }
        }
    }
}

void widen_pair(const uint8_t *codes, Vec &even, Vec &odd) {
    HalfVec pairs;
    std::memcpy(&pairs, codes, sizeof pairs);
    UintVec words = __builtin_convertvector(pairs, UintVec);
    even = __builtin_convertvector((IntVec)(words << 24) >> 24, Vec);
    odd = __builtin_convertvector((IntVec)(words << 16) >> 24, Vec);
}

// Integers.
void decode_bytes(float *to, const uint8_t *codes, int64_t units) {
    for (int64_t unit = 0; unit < units; unit++, codes += 32, to += 2 * kPanel) {
        __builtin_prefetch(codes + kAhead);
        for (int v = 0; v < kVectors; v++) {
            Vec even, odd;
            widen_pair(codes + v * kLanes * 2, even, odd);
            store(to + v * kLanes, even);
            store(to + kPanel + v * kLanes, odd);
        }
    }
}

// Any table of 256.
void decode_bytes(float *to, const uint8_t *codes, int64_t units, const float *values) {
    for (int64_t unit = 0; unit < units; unit++, codes += 32, to += 2 * kPanel) {
        __builtin_prefetch(codes + kAhead);
        for (int v = 0; v < kVectors; v++) {
            HalfVec pairs;
            std::memcpy(&pairs, codes + v * kLanes * 2, sizeof pairs);
            UintVec words = __builtin_convertvector(pairs, UintVec);
            store(to + v * kLanes, gather(values, words & 0xffu));
            store(to + kPanel + v * kLanes, gather(values, words >> 8));
        }
    }
}

// What the codes of a matrix stand for, without their scales.
template <typename W> struct Numbers {
    const CodedMatrix &matrix;

    explicit Numbers(const CodedMatrix &of) : matrix(of) {}

    // `units` of a panel from column `start` on: [columns][16], or for bfloat16 [columns / 2][16][2].
    void read(W *to, int64_t panel, int64_t start, int64_t units) const {
        const uint8_t *codes = place_of(matrix, panel, start);
        if (matrix.bits == 4)
            decode_nibbles(to, codes, units, matrix.table);
        else if (matrix.table)
            decode_bytes(to, codes, units, matrix.table);
        else
            decode_bytes(to, codes, units);
    }
};

#if defined(__AVX512BF16__)
// Integers of eight bits are bfloat16 values.
void decode_bytes(bf16 *to, const uint8_t *codes, int64_t units) {
    for (int64_t unit = 0; unit < units; unit++, codes += 32, to += 2 * kPanel) {
        __builtin_prefetch(codes + kAhead);
        Vec even, odd;
        widen_pair(codes, even, odd);
        UintVec both = ((UintVec)even >> 16) | (UintVec)odd;
        std::memcpy(to, &both, sizeof both);
    }
}

template <> struct Numbers<bf16> {
    const CodedMatrix &matrix;

    explicit Numbers(const CodedMatrix &of) : matrix(of) {
        if (!matrix.table) return;
        for (int index = 0; index < 256; index++) {
            // Twice the same 16, since an index has five bits, of which the highest belongs to the next column.
            uint16_t bits = narrow<bf16>(matrix.table[matrix.bits == 4 ? index % 16 : index]).bits;
            if (index < 32) words_[index] = bits;
            low_[index] = uint8_t(bits), high_[index] = uint8_t(bits >> 8);
        }
    }

    void read(bf16 *to, int64_t panel, int64_t start, int64_t units) const {
        const uint8_t *codes = place_of(matrix, panel, start);
        if (matrix.bits == 4)
            read_nibbles(to, codes, units);
        else if (matrix.table)
            read_bytes(to, codes, units);
        else
            decode_bytes(to, codes, units);
    }

  private:
    void read_nibbles(bf16 *to, const uint8_t *codes, int64_t units) const {
        __m512i table = _mm512_load_si512(words_);
        for (int64_t unit = 0; unit < units; unit++, codes += 64, to += 8 * kPanel) {
            __builtin_prefetch(codes + kAhead);
            __m512i words = _mm512_loadu_si512(codes);
            _mm512_storeu_si512(to, _mm512_permutexvar_epi16(words, table));
            _mm512_storeu_si512(to + 2 * kPanel, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table));
            _mm512_storeu_si512(to + 4 * kPanel, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table));
            _mm512_storeu_si512(to + 6 * kPanel, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table));
        }
    }

    // Two units at a time: the low bytes of 64 numbers, the high bytes, and both side by side.
    void read_bytes(bf16 *to, const uint8_t *codes, int64_t units) const {
        __m512i low[4], high[4];
        for (int part = 0; part < 4; part++) {
            low[part] = _mm512_load_si512(low_ + part * 64);
            high[part] = _mm512_load_si512(high_ + part * 64);
        }
        // Interleaving takes eight bytes of each 16: the first four times eight are to be the first unit.
        __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
        for (int64_t unit = 0; unit < units; unit += 2, codes += 64, to += 4 * kPanel) {
            __builtin_prefetch(codes + kAhead);
            bool two = unit + 1 < units;
            __m512i loaded = _mm512_maskz_loadu_epi64(two ? 0xff : 0x0f, codes);
            // The form without a mask makes GCC 12 warn of its own headers.
            __m512i index = _mm512_maskz_permutexvar_epi64(0xff, order, loaded);
            __mmask64 upper = _mm512_movepi8_mask(index);
            auto chosen = [&](const __m512i *table) {
                return _mm512_mask_blend_epi8(upper, _mm512_permutex2var_epi8(table[0], index, table[1]),
                                              _mm512_permutex2var_epi8(table[2], index, table[3]));
            };
            __m512i lower_bytes = chosen(low), upper_bytes = chosen(high);
            _mm512_storeu_si512(to, _mm512_unpacklo_epi8(lower_bytes, upper_bytes));
            if (two) _mm512_storeu_si512(to + 2 * kPanel, _mm512_unpackhi_epi8(lower_bytes, upper_bytes));
        }
    }

    alignas(64) uint16_t words_[32];
    alignas(64) uint8_t low_[256], high_[256];
};
#endif

// Numbers under 2^-14 are slow to make but by the instruction.
Vec widen_half(const void *from) {
    HalfVec halves;
    std::memcpy(&halves, from, sizeof halves);
#if defined(__AVX512F__)
    return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)halves);
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps((__m128i)halves);
#else
    UintVec bits = __builtin_convertvector(halves, UintVec);
    // The exponent's bias grows from 15 to 127; subnormals become normal by the way.
    Vec magnitude = (Vec)((bits & 0x7fffu) << 13) * 0x1p112f;
    return (Vec)((UintVec)magnitude | (bits & 0x8000u) << 16);
#endif
}

// Rows of W, one to a lane, which are those of a panel from lane v * kLanes on; beyond the last its last.
IntVec rows_of(int64_t panel, int64_t rows, int v) {
    IntVec out;
    for (int lane = 0; lane < kLanes; lane++)
        out[lane] = int32_t(std::min(panel * kPanel + v * kLanes + lane, rows - 1));
    return out;
}

Vec coded_value_at(const Values &values, int64_t at, int64_t panel, int64_t group, int64_t groups, int64_t rows, int v) {
    typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
    Bytes codes;
    std::memcpy(&codes, (const uint8_t *)values.data + at, sizeof codes);
    Vec numbers = gather(values.table, __builtin_convertvector(codes, UintVec));
    if (values.block_size > rows * groups + values.skip) return apart(numbers * values.factors[0]) + values.offset;
    IntVec row = rows_of(panel, rows, v);
    bool is_power = (values.block_size & (values.block_size - 1)) == 0;
    Vec factors;
    if (is_power && rows * groups + values.skip < (int64_t(1) << 31)) {
        UintVec place = (UintVec)(row * int32_t(groups) + int32_t(group + values.skip));
        factors = gather(values.factors, place >> uint32_t(__builtin_ctzll(uint64_t(values.block_size))));
    } else {
        for (int lane = 0; lane < kLanes; lane++)
            factors[lane] = values.factors[(int64_t(row[lane]) * groups + group + values.skip) / values.block_size];
    }
    return apart(numbers * factors) + values.offset;
}

// Of one group, the rows of a panel from lane v * kLanes on.
Vec value_at(const Values &values, int64_t panel, int64_t group, int64_t groups, int64_t rows, int v) {
    int64_t at = (panel * groups + group) * kPanel + v * kLanes;
    switch (values.type) {
        case 0: return load((const float *)values.data + at);
        case 1: return widen_half((const uint16_t *)values.data + at);
        case 2: return load((const bf16 *)values.data + at);
        case 3: return coded_value_at(values, at, panel, group, groups, rows, v);
    }
    IntVec row = rows_of(panel, rows, v);
    Vec out;
    for (int lane = 0; lane < kLanes; lane++)
        out[lane] = ((const float *)values.data)[values.row_groups[row[lane]] * groups + group];
    return out;
}

// ---- the product

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

// Columns that a piece takes once decoded: tiles read 32 at a time.
template <typename W> int64_t decoded_columns(const Piece &piece) {
    return round_up(piece.columns, sizeof(W) == 2 ? kDepth : 8);
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

    int64_t groups() const { return (matrix.columns + matrix.group_size - 1) / matrix.group_size; }
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
                   held + decoded_columns<W>(product_.pieces[done]) <= product_.capacity)
                held += decoded_columns<W>(product_.pieces[done++]);
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
                to += decoded_columns<W>(piece) * kPanel;
            }
        }
    }

    void decode_piece(W *to, int64_t p, const Piece &piece) {
        int64_t unit = unit_columns(product_.matrix.bits), units = (piece.columns + unit - 1) / unit;
        numbers_.read(to, panel_ + p, piece.start, units);
        int64_t missing = decoded_columns<W>(piece) - units * unit;
        std::memset(to + units * unit * kPanel, 0, size_t(missing * kPanel) * sizeof(W));
    }

    void decode_values(int64_t p, size_t index) {
        const CodedMatrix &matrix = product_.matrix;
        int64_t group = product_.pieces[index].group, groups = product_.groups();
        for (int v = 0; v < kVectors; v++) {
            Vec scale = value_at(matrix.scale, panel_ + p, group, groups, matrix.rows, v) * matrix.factor;
            int64_t at = value_index(p, index) + v * kLanes;
            store(scales_.data() + at, scale);
            if (!product_.shifted()) continue;
            Vec shift = splat(0.0f);
            if (matrix.zero) {
                const int8_t *zero = matrix.zero + ((panel_ + p) * groups + group) * kPanel + v * kLanes;
                for (int lane = 0; lane < kLanes; lane++) shift[lane] = -float(zero[lane]);
                shift = shift * scale;
            }
            if (matrix.minimum.data)
                shift += value_at(matrix.minimum, panel_ + p, group, groups, matrix.rows, v);
            store(shifts_.data() + at, shift);
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
            decoded += decoded_columns<W>(piece) * kPanel;
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
    void multiply_in_tiles(int64_t row, int upper, int lower, int64_t p) {
        bool two = p + 1 < count_;
        const W *first = panel(p), *second = panel(p + 1);
        int64_t bytes = product_.x_stride * 2;
        alignas(64) float sums[4][16 * kPanel];
        for (size_t index = first_; index < last_; index++) {
            const Piece &piece = product_.pieces[index];
            const W *top = product_.x + row * product_.x_stride + piece.start, *bottom = top + 16 * product_.x_stride;
            sum_tiles(top, bottom, bytes, first, second, piece.columns, two, lower > 0);
            _tile_stored(0, sums[0], 64);
            add_tile(sums[0], row, upper, p, index);
            if (two) {
                _tile_stored(1, sums[1], 64);
                add_tile(sums[1], row, upper, p + 1, index);
            }
            if (lower) {
                _tile_stored(2, sums[2], 64);
                add_tile(sums[2], row + 16, lower, p, index);
                if (two) {
                    _tile_stored(3, sums[3], 64);
                    add_tile(sums[3], row + 16, lower, p + 1, index);
                }
            }
            first += decoded_columns<W>(piece) * kPanel;
            second += decoded_columns<W>(piece) * kPanel;
        }
    }

    void multiply_rows(int64_t row_stop) {
        if constexpr (sizeof(W) == 2) {
            for (int64_t row = row_; row < row_stop; row += 32) {
                int height = int(std::min<int64_t>(32, row_stop - row));
                int upper = std::min(height, 16), lower = height - upper;
                if (height != configured_) configure(upper, lower);
                configured_ = height;
                for (int64_t p = 0; p < count_; p += 2) multiply_in_tiles(row, upper, lower, p);
            }
        } else {
            multiply_in_vectors(row_stop);
        }
    }

  public:
    ~Decoded() {
        if (configured_ >= 0) _tile_release();
    }

  private:
    int configured_ = -1;
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

template <typename T>
void coded_linear(const CodedMatrix &matrix, T *out, const T *x, const T *bias, int64_t rows, int64_t x_stride,
                  int64_t out_stride, int threads) {
    using W = typename Work<T>::Type;
    CodedProduct<T> product{
        matrix, {out, bias, matrix.rows, out_stride}, nullptr, x_stride, rows, cut(matrix.columns, matrix.group_size), {}, 0};
    // What is read of a row of x, and how much is decoded of a panel.
    int64_t depth = matrix.columns, whole = 0;
    for (const Piece &piece : product.pieces) {
        if (sizeof(W) == 2) depth = std::max(depth, piece.start + decoded_columns<W>(piece));
        whole += decoded_columns<W>(piece);
    }
    std::vector<W> scratch;
    product.x = readable(scratch, x, rows, matrix.columns, depth, product.x_stride);
    if (product.shifted()) {
        size_t count = product.pieces.size();
        product.x_sums.resize(size_t(rows) * count);
        for (int64_t row = 0; row < rows; row++)
            for (size_t index = 0; index < count; index++) {
                const Piece &piece = product.pieces[index];
                float sum = 0.0f;
                for (int64_t k = 0; k < piece.columns; k++)
                    sum += widen(product.x[row * product.x_stride + piece.start + k]);
                product.x_sums[size_t(row) * count + index] = sum;
            }
    }
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

// ---- the product with W in place of its transpose

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

// out: [rows, matrix columns] = y [rows, matrix rows] @ W, columns in the order of the codes.
GRAFT_API void graft_turned_coded_linear(void *out, const void *y, const CodedMatrix *matrix, int dtype, int64_t rows,
                                         int64_t y_stride, int64_t out_stride, int threads) {
    CodedColumns columns(*matrix);
    if (dtype == 0)
        multiply_turned(columns, (float *)out, (const float *)y, rows, y_stride, out_stride, threads);
    else
        multiply_turned(columns, (bf16 *)out, (const bf16 *)y, rows, y_stride, out_stride, threads);
}
