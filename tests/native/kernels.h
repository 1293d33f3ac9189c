#pragma once

#include <cstdint>

namespace stress {

// Return the number of compared reductions.
long test_kernels(uint64_t seed, long rounds);

}  // namespace stress
