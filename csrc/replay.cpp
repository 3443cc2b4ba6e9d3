#include "graft.h"

// Calls that were recorded, one after the other. Each is, in words: the address of a `_recorded` function, how many
// arguments it has, and the arguments.
GRAFT_API void graft_replay(const int64_t *words, int64_t calls) {
    for (int64_t call = 0; call < calls; call++) {
        auto *function = reinterpret_cast<void (*)(const int64_t *)>(words[0]);
        function(words + 2);
        words += 2 + words[1];
    }
}
