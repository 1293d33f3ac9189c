/* Arrays read by NumPy's C API: what the files of this module share. */
#pragma once

#include <stdint.h>

#include "../common/types.cdef.h"

enum { SHAPE = sizeof((fl_signature *)0)->shape / sizeof(int64_t) };
