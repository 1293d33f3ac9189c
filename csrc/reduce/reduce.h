// Reductions of n arrays in rank order, for every fl_dtype and fl_reduce_op that go together.
#pragma once

#include <cstddef>

#include "../common/abi.h"

namespace fl {

// into[i] = scale * (from[0][i] op from[1][i] op ...), always in this order, so that the bits do
// not depend on who computes them. float16 and bfloat16 accumulate in float32 and round once;
// integers wrap and multiply by the integral scale; min and max propagate NaN, as NumPy does; and, or
// and xor are bitwise, of integers, or of the truth of bool, and know no scale; avg is sum with
// scale / ranks.
// `into` may be one of `from`. Returns false where dtype and op do not go together.
bool reduce(int dtype, int op, double scale, void* into, const void* const* from, int ranks,
            size_t count);

}  // namespace fl
