// What the caller describes low-rank updates with.
#pragma once

#include <cstdint>

namespace graft {

// Of one expand: columns [out_start, out_stop) get shrunk columns [rank_start, rank_stop) times `matrix`.
struct Expand {
    const void *matrix;  // [rank_stop - rank_start, out_stop - out_start]
    int64_t stride;
    int64_t out_start, out_stop, rank_start, rank_stop;
};

// Of one adapter. In memory: these fields, then `num_expands` of the above.
struct Update {
    const void *shrink;  // [in, rank]
    int64_t stride;
    int64_t rank;
    int64_t dtype;  // of all matrices
    int64_t num_expands;
    const Expand *expands() const { return reinterpret_cast<const Expand *>(this + 1); }
};

struct Segment {
    int64_t start, stop;
    const Update *update;  // or null, for rows that are left alone
};

}  // namespace graft
