// Sharing work out over threads, always the same way: which thread computes what never changes a result.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace graft {

// body(start, stop) for contiguous shares of [0, count).
template <typename Body> void parallel(int64_t count, int threads, const Body &body) {
    int team = int(std::min<int64_t>(threads, count));
    if (team <= 1) {
        if (count > 0) body(int64_t(0), count);
        return;
    }
#pragma omp parallel num_threads(team)
    {
        int64_t index = omp_get_thread_num(), size = omp_get_num_threads();
        int64_t start = count * index / size, stop = count * (index + 1) / size;
        if (start < stop) body(start, stop);
    }
}

// Work below this many multiplications, some microseconds of it, is not worth waking a second thread for: waking one
// costs as much, and on a busy machine it may have to wait for its turn.
constexpr int64_t kForkWork = 1 << 18;
// What an element of these costs in multiplications of a product.
constexpr int64_t kNormWork = 4, kActivationWork = 16, kRotaryWork = 4;

inline int threads_for(int64_t work, int threads) { return work < kForkWork ? 1 : threads; }

}  // namespace graft
