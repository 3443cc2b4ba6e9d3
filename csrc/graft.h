// The plain C interface of the kernels. Pointers are to contiguous rows unless a stride is given; strides count
// elements. `threads` is the most a call may use. dtypes: 0 float32, 1 bfloat16.
#pragma once

#include <cstdint>

#define GRAFT_API extern "C" __attribute__((visibility("default")))
