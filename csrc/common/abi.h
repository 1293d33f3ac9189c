// The part of the C ABI that both native libraries share, for C++.
#pragma once

#include <stddef.h>
#include <stdint.h>

extern "C" {
#include "codes.cdef.h"
#include "types.cdef.h"
#include "group.cdef.h"
}
