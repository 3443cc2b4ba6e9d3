// A matrix of codes of four or eight bits, and numbers for each group of a row's columns: how it lies in memory, and how
// it is read.
//
// Codes lie in panels of 16 rows, as linear.cpp has them:
//   four bits   [N / 16][K / 8] units of 64 bytes: 16 rows of two 16-bit words, for even and odd columns; the lowest
//               nibble of a word is the first of its four columns. A shift and one table look-up give [16][2] values.
//   eight bits  [N / 16][K / 2][16][2], signed integers or, as four bits, what a table has a number for
// Scales, zeros and minima are [N / 16][groups][16], but for those that many rows have in common.
#pragma once

#include "panels.h"

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
    int32_t by_row;  // whether a row's product must not depend on how many there are

    int64_t groups() const { return (columns + group_size - 1) / group_size; }
};

// ---- codes

// Columns of a panel that lie together, and their bytes.
constexpr int64_t unit_columns(int bits) { return bits == 8 ? 2 : 8; }
constexpr int64_t unit_bytes(int bits) { return bits == 8 ? 32 : 64; }

inline int64_t panel_bytes(int64_t columns, int bits) {
    return (columns + unit_columns(bits) - 1) / unit_columns(bits) * unit_bytes(bits);
}

// Where in its panel a code lies: the byte, and the lowest bit in it.
struct Place {
    int64_t byte;
    int shift;
};
inline Place place(int64_t lane, int64_t k, int bits) {
    if (bits == 8) return {k / 2 * 32 + lane * 2 + k % 2, 0};
    int64_t pair = k % 8 / 2;
    return {k / 8 * 64 + lane * 4 + k % 2 * 2 + pair / 2, int(pair % 2 * 4)};
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

inline const uint8_t *place_of(const CodedMatrix &matrix, int64_t panel, int64_t column) {
    return matrix.codes + panel * panel_bytes(matrix.columns, matrix.bits) +
           column / unit_columns(matrix.bits) * unit_bytes(matrix.bits);
}

// Ahead of what is read: about what memory delivers while a request for it is under way.
constexpr int64_t kAhead = 1024;

inline void decode_nibbles(float *to, const uint8_t *codes, int64_t units, const float *values) {
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

inline void widen_pair(const uint8_t *codes, Vec &even, Vec &odd) {
    HalfVec pairs;
    std::memcpy(&pairs, codes, sizeof pairs);
    UintVec words = __builtin_convertvector(pairs, UintVec);
    even = __builtin_convertvector((IntVec)(words << 24) >> 24, Vec);
    odd = __builtin_convertvector((IntVec)(words << 16) >> 24, Vec);
}

// Integers.
inline void decode_bytes(float *to, const uint8_t *codes, int64_t units) {
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
inline void decode_bytes(float *to, const uint8_t *codes, int64_t units, const float *values) {
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
inline void decode_bytes(bf16 *to, const uint8_t *codes, int64_t units) {
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
inline Vec widen_half(const void *from) {
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
inline IntVec rows_of(int64_t panel, int64_t rows, int v) {
    IntVec out;
    for (int lane = 0; lane < kLanes; lane++)
        out[lane] = int32_t(std::min(panel * kPanel + v * kLanes + lane, rows - 1));
    return out;
}

inline Vec coded_value_at(const Values &values, int64_t at, int64_t panel, int64_t group, int64_t groups, int64_t rows, int v) {
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
inline Vec value_at(const Values &values, int64_t panel, int64_t group, int64_t groups, int64_t rows, int v) {
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

// What a group's numbers are multiplied by, and what is added: w = number * scale + shift.
struct GroupNumbers {
    Vec scale, shift;
};

inline GroupNumbers group_numbers(const CodedMatrix &matrix, int64_t panel, int64_t group, int v) {
    int64_t groups = matrix.groups();
    GroupNumbers out{value_at(matrix.scale, panel, group, groups, matrix.rows, v) * matrix.factor, splat(0.0f)};
    if (matrix.zero) {
        const int8_t *zero = matrix.zero + (panel * groups + group) * kPanel + v * kLanes;
        for (int lane = 0; lane < kLanes; lane++) out.shift[lane] = -float(zero[lane]);
        out.shift = out.shift * out.scale;
    }
    if (matrix.minimum.data) out.shift += value_at(matrix.minimum, panel, group, groups, matrix.rows, v);
    return out;
}

}  // namespace graft
