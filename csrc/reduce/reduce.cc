#include "reduce.h"

#include "sets.h"

namespace fl {
namespace {

Kernel* choose() {
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

Kernel* const kernel = choose();

}  // namespace

bool reduce(int dtype, int op, double scale, void* into, const void* const* from, int ranks, size_t count) {
  if (op == FL_AVG) return reduce(dtype, FL_SUM, scale / ranks, into, from, ranks, count);
  return kernel(dtype, op, scale, into, from, ranks, count);
}

}  // namespace fl
