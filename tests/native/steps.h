#pragma once

#include <cstdint>

namespace stress {

// Returns how many steps of optimizers were compared.
long test_steps(uint64_t seed, long rounds);

}  // namespace stress
