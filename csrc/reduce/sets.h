// The kernels of each instruction set. The set is selected at run time, so that one binary runs on every
// processor. No set fuses multiply-adds implicitly, so all give the same bits. Each set has a separate source
// file for parallel compilation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <type_traits>

// The model checker is built with the baseline set only.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(FL_MODEL)
#define FL_SEVERAL_KERNELS 1
#include <immintrin.h>
#endif

#include "half.h"
#include "reduce.h"

namespace fl {

using Kernel = bool(int dtype, int op, double scale, void* into, const void* const* from, int ranks, size_t count);

namespace baseline {
Kernel reduce_all;
}
namespace avx2 {
Kernel reduce_all;
}
namespace avx512 {
Kernel reduce_all;
}

}  // namespace fl
