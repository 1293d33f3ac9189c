// The shared part of the C ABI, as C++ sees it.
#pragma once

#include <stddef.h>
#include <stdint.h>

extern "C" {
#include "codes.cdef.h"
#include "types.cdef.h"
#include "group.cdef.h"
}
