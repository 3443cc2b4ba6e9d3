// Turning a square of numbers, as many rows as a vector has lanes.
#pragma once

#include <utility>

#include "simd.h"

namespace graft {

// Lanes of `a` whose index has the bit D change places with those of `b`, D lanes below, that have it not.
template <int D, size_t... Lane> void exchange(Vec &a, Vec &b, std::index_sequence<Lane...>) {
    Vec first = __builtin_shufflevector(a, b, (Lane & D ? kLanes + int(Lane) - D : int(Lane))...);
    b = __builtin_shufflevector(a, b, (Lane & D ? kLanes + int(Lane) : int(Lane) + D)...);
    a = first;
}

template <int D = kLanes / 2> void transpose(Vec (&rows)[kLanes]) {
    for (int row = 0; row < kLanes; row++)
        if (!(row & D)) exchange<D>(rows[row], rows[row + D], std::make_index_sequence<kLanes>{});
    if constexpr (D > 1) transpose<D / 2>(rows);
}

// Sums of lanes of N vectors that are D apart in a square of them: the whole square gives lane by lane the sum of each.
template <int D, int N> Vec folded(Vec (&rows)[N]) {
    constexpr int kHalf = N / 2;
    if constexpr (N == 1) {
        return rows[0];
    } else {
        Vec halves[kHalf];
        for (int row = 0; row < kHalf; row++) {
            exchange<D>(rows[row], rows[row + kHalf], std::make_index_sequence<kLanes>{});
            halves[row] = rows[row] + rows[row + kHalf];
        }
        return folded<D / 2>(halves);
    }
}

}  // namespace graft
