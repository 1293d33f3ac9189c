// Kernels of flashlight_py.tagi: what NumPy would take several passes over memory for.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
#include "tagi.cdef.h"
}
