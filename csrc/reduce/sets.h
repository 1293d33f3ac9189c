// The kernels for each instruction set, chosen when first used: one binary runs anywhere and is fast
// everywhere. None contracts into fused multiply-adds, so all give the same bits. Each set has a source of
// its own, which compile side by side.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

// The model checker needs the baseline alone.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(FL_MODEL)
#define FL_SEVERAL_KERNELS 1
#include <immintrin.h>
#endif

#include "half.h"
#include "reduce.h"

namespace fl {

using Kernel = bool(int dtype, int op, double scale, void* into, const void* const* from, int ranks,
                    size_t count);

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
