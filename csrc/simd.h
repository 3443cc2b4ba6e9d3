// Vectors of floats, as wide as the level this file is compiled for. GCC and Clang turn the vector extensions used
// here into the instructions of any target, so one source serves them all.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace graft {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UintVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kLanes * 2)));

// bfloat16 as it lies in memory.
struct bf16 {
    uint16_t bits;
};

inline Vec splat(float value) { return Vec{} + value; }

inline float widen(float value) { return value; }
inline float widen(bf16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline UintVec rounded_bits(Vec value) {
    UintVec bits = (UintVec)value;
    UintVec rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    UintVec is_nan = (UintVec)(value != value);
    return ((rounded & ~is_nan) | ((bits | 0x400000u) & is_nan)) >> 16;
}

template <typename T> T narrow(float value);
template <> inline float narrow<float>(float value) { return value; }
template <> inline bf16 narrow<bf16>(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return bf16{uint16_t((bits | 0x400000u) >> 16)};
    return bf16{uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

inline Vec load(const float *from) {
    Vec out;
    std::memcpy(&out, from, sizeof out);
    return out;
}
inline Vec load(const bf16 *from) {
    HalfVec halves;
    std::memcpy(&halves, from, sizeof halves);
    return (Vec)(__builtin_convertvector(halves, UintVec) << 16);
}
inline void store(float *to, Vec value) { std::memcpy(to, &value, sizeof value); }
inline void store(bf16 *to, Vec value) {
#if defined(__AVX512BF16__)
    // As below, but that numbers under 2^-126 become zero.
    __m256bh halves = _mm512_cvtneps_pbh((__m512)value);
#else
    HalfVec halves = __builtin_convertvector(rounded_bits(value), HalfVec);
#endif
    std::memcpy(to, &halves, sizeof halves);
}

// The first `count` lanes; the rest are zero.
template <typename T> Vec load_some(const T *from, int count) {
    if (count >= kLanes) return load(from);
    T lanes[kLanes] = {};
    std::memcpy(lanes, from, count * sizeof(T));
    return load(lanes);
}
template <typename T> void store_some(T *to, Vec value, int count) {
    if (count >= kLanes) return store(to, value);
    T lanes[kLanes];
    store(lanes, value);
    std::memcpy(to, lanes, count * sizeof(T));
}

// What a value becomes when it is stored as T and read again.
template <typename T> Vec rounded(Vec value);
template <> inline Vec rounded<float>(Vec value) { return value; }
template <> inline Vec rounded<bf16>(Vec value) { return (Vec)(rounded_bits(value) << 16); }

// A float that T holds exactly, as T.
template <typename T> T exactly(float value);
template <> inline float exactly<float>(float value) { return value; }
template <> inline bf16 exactly<bf16>(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bf16{uint16_t(bits >> 16)};
}

// A product that is rounded before it goes into a sum: the compiler would do both at once.
inline Vec apart(Vec product) {
    __asm__("" : "+m"(product));
    return product;
}

// from[index], a number for each lane.
inline Vec gather(const float *from, UintVec index) {
#if defined(__AVX512F__)
    return (Vec)_mm512_mask_i32gather_ps(__m512{}, 0xffff, (__m512i)index, from, 4);
#elif defined(__AVX2__)
    return (Vec)_mm256_i32gather_ps(from, (__m256i)index, 4);
#else
    Vec out;
    for (int lane = 0; lane < kLanes; lane++) out[lane] = from[index[lane]];
    return out;
#endif
}

// Lanes are joined pairwise, in a fixed order: the upper half to the lower, again and again.
typedef float Vec4 __attribute__((vector_size(16)));
template <typename Join> float joined(Vec4 value, const Join &join) {
    Vec4 pairs = join(value, __builtin_shufflevector(value, value, 2, 3, 2, 3));
    return join(pairs[0], pairs[1]);
}
#if defined(__AVX2__)
typedef float Vec8 __attribute__((vector_size(32)));
template <typename Join> float joined(Vec8 value, const Join &join) {
    return joined(join(__builtin_shufflevector(value, value, 0, 1, 2, 3),
                       __builtin_shufflevector(value, value, 4, 5, 6, 7)),
                  join);
}
#endif
#if defined(__AVX512F__)
template <typename Join> float joined(Vec value, const Join &join) {
    return joined(join(__builtin_shufflevector(value, value, 0, 1, 2, 3, 4, 5, 6, 7),
                       __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15)),
                  join);
}
#endif
inline float sum(Vec value) {
    return joined(value, [](auto a, auto b) { return a + b; });
}
inline float largest(Vec value) {
    return joined(value, [](auto a, auto b) { return a > b ? a : b; });
}

// Whether any lane of a comparison holds.
inline bool any(IntVec where) {
#if defined(__AVX512DQ__)
    return _mm512_movepi32_mask((__m512i)where) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)where) != 0;
#else
    int32_t found = 0;
    for (int lane = 0; lane < kLanes; lane++) found |= where[lane];
    return found != 0;
#endif
}

inline Vec select(IntVec where, Vec yes, Vec no) {
    return (Vec)(((IntVec)yes & where) | ((IntVec)no & ~where));
}
inline Vec max(Vec a, Vec b) { return select(a > b, a, b); }
inline Vec min(Vec a, Vec b) { return select(a < b, a, b); }

// e^x within 2 units in the last place; 0 below -87.3, infinity above 88.7, NaN for NaN.
// Method: x = n ln 2 + r with ln 2 in two parts, a polynomial in r, and n added to the exponent (Cephes, expf).
inline Vec exp_polynomial(Vec r) {
    Vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * (r * r) + r + 1.0f;
}

#if defined(__AVX512F__)
inline Vec exp(Vec x) {
    // Of a NaN and a number these take the second operand. The forms without a mask make GCC 12 warn of its own headers.
    constexpr __mmask16 kAll = 0xffff;
    // What would be under 2^-126 is left out: to make such numbers takes the processor a hundred times as long.
    __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-87.3f), _CMP_NLT_UQ);
    x = (Vec)_mm512_maskz_max_ps(kAll, (__m512)splat(-87.3f), (__m512)x);
    x = (Vec)_mm512_maskz_min_ps(kAll, (__m512)splat(89.0f), (__m512)x);
    Vec whole = (Vec)_mm512_maskz_roundscale_ps(kAll, (__m512)(x * 1.44269504088896341f), 0);
    Vec r = x - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    return (Vec)_mm512_maskz_scalef_ps(normal, (__m512)exp_polynomial(r), (__m512)whole);
}
#else
inline Vec exp(Vec x) {
    Vec clamped = min(max(x, splat(-87.3f)), splat(88.7f));
    Vec scaled = clamped * 1.44269504088896341f;
    // Adding and taking away 1.5 * 2^23 rounds to an integer.
    Vec shifted = scaled + 12582912.0f;
    IntVec n = (IntVec)shifted - 0x4b400000;
    Vec whole = shifted - 12582912.0f;
    Vec r = clamped - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    Vec value = exp_polynomial(r);
    // In two steps: 2^128 alone is no float.
    IntVec half = n >> 1;
    value = value * (Vec)((half + 127) << 23) * (Vec)((n - half + 127) << 23);
    value = select(x < splat(-87.3f), splat(0.0f), value);
    value = select(x > splat(88.7f), splat(__builtin_inff()), value);
    return select(x != x, x, value);
}
#endif

inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp(-x)); }

// tanh x = 1 - 2 / (e^2x + 1), with an odd polynomial near zero where that cancels (Cephes, tanhf).
inline Vec tanh(Vec x) {
    Vec square = x * x;
    Vec p = splat(-5.70498872745e-3f);
    p = p * square + 2.06390887954e-2f;
    p = p * square + -5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square + -3.33332819422e-1f;
    Vec near = p * square * x + x;
    Vec far = 1.0f - 2.0f / (exp(x + x) + 1.0f);
    return select(square < splat(0.390625f), near, far);
}

}  // namespace graft
