// The C ABI of the Gloo backend, for C++.
#pragma once

#include "../common/abi.h"

extern "C" {
#include "gloo.cdef.h"
}
