// The C ABI of the shared-memory backend, as C++ sees it.
#pragma once

#include "../common/abi.h"

extern "C" {
#include "shm.cdef.h"
}
