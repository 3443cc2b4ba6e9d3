// What products with packed matrices have in common: panels of 16 rows of W, and the instructions that multiply them.
#pragma once

#include <array>
#include <initializer_list>
#include <type_traits>
#include <vector>

#include "parallel.h"
#include "simd.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace graft {

constexpr int kPanel = 16;
constexpr int kVectors = kPanel / kLanes;  // per panel
constexpr int kDepth = 32;                 // what K is padded to in bfloat16

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Whether rows are the first `count` of a panel.
inline bool is_panel(const int64_t *ids, int64_t count) {
    for (int64_t n = 0; n < count; n++)
        if (ids[n] != ids[0] + n) return false;
    return ids[0] % kPanel == 0;
}

// Numbers that begin where a cache line does: one that straddles two costs both.
template <typename W> class Lines {
  public:
    Lines() = default;
    explicit Lines(size_t count) { resize(count); }
    void resize(size_t count) { lines_.resize((count * sizeof(W) + 63) / 64); }
    W *data() { return reinterpret_cast<W *>(lines_.data()); }
    const W *data() const { return reinterpret_cast<const W *>(lines_.data()); }
    size_t size() const { return lines_.size() * 64 / sizeof(W); }

  private:
    struct alignas(64) Line {
        char bytes[64];
    };
    std::vector<Line> lines_;
};

// What x is read as where panels are of type T: float32 where bfloat16 has no product.
template <typename T> struct Work {
    using Type = float;
};
#if defined(__AVX512BF16__)
template <> struct Work<bf16> {
    using Type = bf16;
};
#endif

// y as the caller has it: rows of `columns`, every `stride` elements.
template <typename T> struct Output {
    T *out;
    const T *bias;  // or null
    int64_t columns, stride;

    void finish(int64_t row, int64_t column, Vec total) const {
        int count = int(std::min<int64_t>(columns - column, kLanes));
        if (count <= 0) return;
        if (bias) total += load_some(bias + column, count);
        store_some(out + row * stride + column, total, count);
    }
};

// Both columns k and k + 1 of a bfloat16 panel, or one column of a float32 panel.
template <int R, int V> void multiply(Vec (&total)[R][V], const float *panel, const float *x, int64_t stride) {
    for (int v = 0; v < V; v++) {
        Vec weight = load(panel + v * kLanes);
        for (int r = 0; r < R; r++) total[r][v] += weight * x[r * stride];
    }
}

template <int R, int V> void multiply(Vec (&total)[R][V], const bf16 *panel, const float *x, int64_t stride) {
    for (int v = 0; v < V; v++) {
        UintVec pair;
        std::memcpy(&pair, panel + v * kLanes * 2, sizeof pair);
        Vec even = (Vec)(pair << 16), odd = (Vec)(pair & 0xffff0000u);
        for (int r = 0; r < R; r++) {
            total[r][v] += even * x[r * stride];
            total[r][v] += odd * x[r * stride + 1];
        }
    }
}

#if defined(__AVX512BF16__)
template <int R, int V> void multiply(Vec (&total)[R][V], const bf16 *panel, const bf16 *x, int64_t stride) {
    for (int v = 0; v < V; v++) {
        __m512bh weight = (__m512bh)_mm512_loadu_si512(panel + v * kLanes * 2);
        for (int r = 0; r < R; r++) {
            int32_t pair;
            std::memcpy(&pair, x + r * stride, 4);
            total[r][v] = (Vec)_mm512_dpbf16_ps((__m512)total[r][v], weight, (__m512bh)_mm512_set1_epi32(pair));
        }
    }
}
#endif

#if defined(__AMX_BF16__)
struct TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t column_bytes[16] = {};
    uint8_t rows[16] = {};
};

// rows: of each tile. depth: columns of x that a tile holds, twice as many as a panel's has rows. of_x: tiles that hold x.
inline void configure(const std::array<int, 8> &rows, int depth, std::initializer_list<int> of_x) {
    TileConfig config;
    for (int index = 0; index < 8; index++) {
        config.column_bytes[index] = rows[size_t(index)] ? 64 : 0;
        config.rows[index] = uint8_t(rows[size_t(index)]);
    }
    for (int index : of_x)
        if (rows[size_t(index)]) config.column_bytes[index] = uint16_t(depth * 2);
    _tile_loadconfig(&config);
}

// Tiles 0-3 hold sums: two of rows by two panels. 4 and 5 hold x, 6 and 7 the panels.
inline void configure(int upper, int lower) {
    configure({upper, upper, lower, lower, upper, lower, kPanel, kPanel}, kDepth, {4, 5});
}
#endif

// x as the kernels of this level read it: padded to the packed depth, and in float32 where bfloat16 has no product.
template <typename X, typename T>
const X *prepared(std::vector<X> &scratch, const T *x, int64_t rows, int64_t columns, int64_t depth, int64_t stride) {
    scratch.resize(size_t(rows * depth));
    for (int64_t row = 0; row < rows; row++) {
        X *to = scratch.data() + row * depth;
        for (int64_t k = 0; k < columns; k++) to[k] = narrow<X>(widen(x[row * stride + k]));
        for (int64_t k = columns; k < depth; k++) to[k] = narrow<X>(0.0f);
    }
    return scratch.data();
}

// x itself where it can be read as it is, else as `prepared`; `stride` becomes that of what is returned.
template <typename T>
const typename Work<T>::Type *readable(std::vector<typename Work<T>::Type> &scratch, const T *x, int64_t rows,
                                       int64_t columns, int64_t depth, int64_t &stride) {
    if constexpr (std::is_same_v<T, typename Work<T>::Type>) {
        if (columns == depth) return x;
    }
    const auto *copy = prepared(scratch, x, rows, columns, depth, stride);
    stride = depth;
    return copy;
}

#if defined(__AMX_BF16__)
inline void zero_tiles(bool lower) {
    _tile_zero(0);
    _tile_zero(1);
    if (lower) {
        _tile_zero(2);
        _tile_zero(3);
    }
}

// Tiles 0 to 3 += rows of x by panels: `top` and, if `lower`, `bottom` by `first` and, if `two`, `second`, as many columns
// as a tile holds. `bytes` from one row of x to the next. Tiles 4 to 7 are used.
inline void add_tile_products(const bf16 *top, const bf16 *bottom, int64_t bytes, const bf16 *first, const bf16 *second,
                              bool two, bool lower) {
    _tile_loadd(6, first, 64);
    _tile_loadd(4, top, bytes);
    _tile_dpbf16ps(0, 4, 6);
    if (two) {
        _tile_loadd(7, second, 64);
        _tile_dpbf16ps(1, 4, 7);
    }
    if (lower) {
        _tile_loadd(5, bottom, bytes);
        _tile_dpbf16ps(2, 5, 6);
        if (two) _tile_dpbf16ps(3, 5, 7);
    }
}

// The same for all of `columns`, a multiple of kDepth.
inline void add_tiles(const bf16 *top, const bf16 *bottom, int64_t bytes, const bf16 *first, const bf16 *second,
                      int64_t columns, bool two, bool lower) {
    for (int64_t k = 0; k < columns; k += kDepth)
        add_tile_products(top + k, bottom + k, bytes, first + k * kPanel, second + k * kPanel, two, lower);
}

// The same from zero.
inline void sum_tiles(const bf16 *top, const bf16 *bottom, int64_t bytes, const bf16 *first, const bf16 *second,
                      int64_t columns, bool two, bool lower) {
    zero_tiles(lower);
    add_tiles(top, bottom, bytes, first, second, columns, two, lower);
}
#endif

}  // namespace graft
