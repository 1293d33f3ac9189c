#include "sets.h"

#ifdef FL_SEVERAL_KERNELS
#define FL_F16C 1
#define FL_WITHOUT_VECTORS baseline
#pragma GCC target("avx2,f16c")
namespace fl::avx2 {
#include "kernels.inc"
}  // namespace fl::avx2
#endif
