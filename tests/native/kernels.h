#pragma once

#include <cstdint>

namespace stress {

// Returns how many reductions were compared.
long test_kernels(uint64_t seed, long rounds);

}  // namespace stress
