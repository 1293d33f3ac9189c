#pragma once

#include <cstdint>

namespace stress {

// Return the number of compared results: reductions, and optimizer steps.
long test_kernels(uint64_t seed, long rounds);
long test_steps(uint64_t seed, long rounds);

}  // namespace stress
