// Reductions of n arrays in rank order, for every supported pair of fl_dtype and fl_reduce_op.
#pragma once

#include <cstddef>

#include "../common/abi.h"

namespace fl {

inline bool is_narrow(int dtype) { return dtype == FL_FLOAT16 || dtype == FL_BFLOAT16; }  // a float of 16 bits

// into[i] = scale * (from[0][i] op from[1][i] op ...), always in this order, so that the bits do not depend
// on the rank that computes them. float16 and bfloat16 accumulate in float32 and round once. Integers wrap,
// and are then multiplied by the scale, an integer. min and max propagate NaN like NumPy. and, or and xor are
// bitwise for integers, logical for bool, and ignore the scale. avg is sum with scale / ranks. `into` may be
// one of `from`. Returns false if op does not support dtype.
bool reduce(int dtype, int op, double scale, void* into, const void* const* from, int ranks, size_t count);

}  // namespace fl
