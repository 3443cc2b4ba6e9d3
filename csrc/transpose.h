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

}  // namespace graft
