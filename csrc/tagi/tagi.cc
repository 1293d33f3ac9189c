#include "tagi.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

// The same kernels for several instruction sets, chosen when the module is loaded. None contracts
// into fused multiply-adds, so all give the same bits.

namespace fl::tagi {
namespace baseline {
#include "kernels.inc"
}  // namespace baseline

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
#include "kernels.inc"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
namespace avx512 {
#include "kernels.inc"
}  // namespace avx512
#pragma GCC pop_options
#define FL_SEVERAL_KERNELS 1
#endif

namespace {

struct Kernels {
  decltype(&baseline::step) step;
};

Kernels choose() {
#ifdef FL_SEVERAL_KERNELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq")) {
    return {avx512::step};
  }
  if (__builtin_cpu_supports("avx2")) return {avx2::step};
#endif
  return {baseline::step};
}

const Kernels kernels = choose();

}  // namespace
}  // namespace fl::tagi

void fl_tagi_step(float* mean, float* variance, const float* mean_sum, const float* variance_sum,
                  size_t size, float inverse_cap) {
  fl::tagi::kernels.step(mean, variance, mean_sum, variance_sum, size, inverse_cap);
}
