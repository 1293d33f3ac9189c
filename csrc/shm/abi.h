// The C ABI of the shared-memory backend, for C++.
#pragma once

#include "../common/abi.h"

extern "C" {
#include "shm.cdef.h"
}
