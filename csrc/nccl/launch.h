#pragma once

#include <stddef.h>
#include <stdint.h>

#include "csrc/nccl/launch.cdef.h"
