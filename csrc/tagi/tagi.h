// Kernels of flashlight_py.tagi that replace several NumPy passes over memory.
#pragma once

#include <stddef.h>
#include <stdint.h>

extern "C" {
#include "tagi.cdef.h"
}
