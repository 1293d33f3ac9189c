// The C ABI of the Gloo backend, as C++ sees it.
#pragma once

#include "../common/abi.h"

extern "C" {
#include "gloo.cdef.h"
}
