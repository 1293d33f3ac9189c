#pragma once

#include <cstdint>

namespace stress {

// Each returns how many it has compared: reductions, and steps of optimizers.
long test_kernels(uint64_t seed, long rounds);
long test_steps(uint64_t seed, long rounds);

}  // namespace stress
