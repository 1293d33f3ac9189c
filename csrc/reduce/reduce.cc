#include "reduce.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "half.h"

// The same kernels for several instruction sets, chosen when first used: one binary runs anywhere
// and is fast everywhere. None contracts into fused multiply-adds, so all give the same bits.

namespace fl {
namespace baseline {
#include "kernels.inc"
}  // namespace baseline

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FL_F16C 1
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
namespace avx2 {
#include "kernels.inc"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
// GCC 12 fuses the products of complex numbers here in spite of -ffp-contract=off (into vfmaddsub),
// which gives other bits. AVX2 without FMA cannot.
#define FL_FUSES 1
namespace avx512 {
#include "kernels.inc"
}  // namespace avx512
#undef FL_FUSES
#pragma GCC pop_options
#define FL_SEVERAL_KERNELS 1
#endif

namespace {

using Kernel = bool (*)(int, int, double, void*, const void* const*, int, size_t);

Kernel choose() {
#ifdef FL_SEVERAL_KERNELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq")) {
    return avx512::reduce_all;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return avx2::reduce_all;
#endif
  return baseline::reduce_all;
}

const Kernel kernel = choose();

}  // namespace

bool reduce(int dtype, int op, double scale, void* into, const void* const* from, int ranks,
            size_t count) {
  if (op == kAvg) return reduce(dtype, kSum, scale / ranks, into, from, ranks, count);
  return kernel(dtype, op, scale, into, from, ranks, count);
}

}  // namespace fl
