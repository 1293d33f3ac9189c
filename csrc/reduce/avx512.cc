#include "sets.h"

#ifdef FL_SEVERAL_KERNELS
#define FL_F16C 1
#define FL_WITHOUT_VECTORS baseline
// GCC 12 fuses products of complex numbers in this set (into vfmaddsub) despite -ffp-contract=off, which
// gives other bits. It does not fuse them in the set AVX2, which has no FMA.
#define FL_FUSES 1
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
namespace fl::avx512 {
#include "kernels.inc"
}  // namespace fl::avx512
#endif
