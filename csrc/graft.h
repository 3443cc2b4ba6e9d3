// The plain C interface of the kernels. Pointers are to contiguous rows unless a stride is given; strides count
// elements. `threads` is the most a call may use. dtypes: 0 float32, 1 bfloat16.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define GRAFT_API extern "C" __attribute__((visibility("default")))

// Besides `function`, `function`_recorded, which takes its arguments as words: what `graft_replay` calls.
#define GRAFT_RECORDABLE(function) \
    GRAFT_API void function##_recorded(const int64_t *words) { graft::call_with_words(function, words); }

namespace graft {

// An argument as it was recorded: an address, a whole number, or the bits of a float.
template <typename T> T argument(int64_t word) {
    if constexpr (std::is_pointer<T>::value) {
        return reinterpret_cast<T>(word);
    } else if constexpr (std::is_same<T, float>::value) {
        float value;
        std::memcpy(&value, &word, sizeof value);
        return value;
    } else {
        return static_cast<T>(word);
    }
}

template <typename... A, size_t... I>
void call_with_words(void (*function)(A...), const int64_t *words, std::index_sequence<I...>) {
    function(argument<A>(words[I])...);
}

template <typename... A> void call_with_words(void (*function)(A...), const int64_t *words) {
    call_with_words(function, words, std::index_sequence_for<A...>());
}

}  // namespace graft
