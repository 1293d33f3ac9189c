// Kernels of flashlight_py.tagi: what NumPy would take several passes over memory for.
#pragma once

#include <stddef.h>
#include <stdint.h>

extern "C" {
#include "tagi.cdef.h"
}
