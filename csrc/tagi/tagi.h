// Kernels of flashlight_py.tagi: what NumPy would take several passes over memory for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

extern "C" {
#include "tagi.cdef.h"
}

namespace fl::tagi {

// 0; -1 where there is no memory for `run`.
template <typename Run>
int with_room(Run run) noexcept {
  try {
    run();
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

}  // namespace fl::tagi
