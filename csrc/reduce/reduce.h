// Reductions of n arrays in rank order, for every dtype that the collectives take.
#pragma once

#include <cstddef>

namespace fl {

enum DType {
  kBool = 0,
  kInt8, kInt16, kInt32, kInt64,
  kUint8, kUint16, kUint32, kUint64,
  kFloat16, kBfloat16, kFloat32, kFloat64, kLongDouble,
  kComplex64, kComplex128, kComplexLongDouble,
};

enum ReduceOp { kSum = 0, kProd = 1, kMin = 2, kMax = 3, kAvg = 4, kAnd = 5, kOr = 6, kXor = 7 };

// into[i] = scale * (from[0][i] op from[1][i] op ...), always in this order, so that the bits do
// not depend on who computes them. float16 and bfloat16 accumulate in float32 and round once;
// integers wrap and multiply by the integral scale; min and max propagate NaN, as NumPy does; and, or
// and xor are bitwise, of integers, or of the truth of bool, and know no scale; avg is sum with
// scale / ranks.
// `into` may be one of `from`. Returns false where dtype and op do not go together.
bool reduce(int dtype, int op, double scale, void* into, const void* const* from, int ranks,
            size_t count);

}  // namespace fl
