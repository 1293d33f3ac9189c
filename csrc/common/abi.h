// The C ABI that the shared-memory and the Gloo library have in common, as C++ declarations.
#pragma once

#include <stddef.h>
#include <stdint.h>

extern "C" {
#include "codes.cdef.h"
#include "types.cdef.h"
#include "group.cdef.h"
}
