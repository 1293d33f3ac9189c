// C++ declarations of the C ABI that the shared-memory library and the Gloo library have in common.
#pragma once

#include <stddef.h>
#include <stdint.h>

extern "C" {
#include "codes.cdef.h"
#include "types.cdef.h"
#include "group.cdef.h"
}
