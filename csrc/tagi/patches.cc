#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "tagi.h"

// As in tagi.cc: the same loops for several instruction sets, chosen when the module is loaded.

namespace fl::tagi {
namespace patches_baseline {
#include "patches.inc"
}  // namespace patches_baseline

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("avx2")
namespace patches_avx2 {
#include "patches.inc"
}  // namespace patches_avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
namespace patches_avx512 {
#include "patches.inc"
}  // namespace patches_avx512
#pragma GCC pop_options
#define FL_SEVERAL_KERNELS 1
#endif

namespace {

struct Kernels {
  decltype(&patches_baseline::patches) patches;
  decltype(&patches_baseline::add_patches) add_patches;
  decltype(&patches_baseline::sum_windows) sum_windows;
  decltype(&patches_baseline::spread_windows) spread_windows;
  decltype(&patches_baseline::largest) largest;
  decltype(&patches_baseline::spread_taken) spread_taken;
};

#define FL_KERNELS(set)                                                                         \
  {set::patches,        set::add_patches, set::sum_windows, \
   set::spread_windows, set::largest,     set::spread_taken}

Kernels choose() {
#ifdef FL_SEVERAL_KERNELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq")) {
    return FL_KERNELS(patches_avx512);
  }
  if (__builtin_cpu_supports("avx2")) return FL_KERNELS(patches_avx2);
#endif
  return FL_KERNELS(patches_baseline);
}

const Kernels kernels = choose();

}  // namespace
}  // namespace fl::tagi

void fl_tagi_patches(const fl_tagi_windows* windows, const float* mean, const float* variance,
                     float* means, float* variances, float* moments) {
  fl::tagi::kernels.patches(*windows, mean, variance, means, variances, moments);
}

void fl_tagi_add_patches(const fl_tagi_windows* windows, const float* patches, float* images) {
  fl::tagi::kernels.add_patches(*windows, patches, images);
}

void fl_tagi_sum_windows(const fl_tagi_windows* windows, const float* images, float* sums,
                         ptrdiff_t image_step, ptrdiff_t channel_step, float factor) {
  fl::tagi::kernels.sum_windows(*windows, images, sums, image_step, channel_step, factor);
}

void fl_tagi_spread_windows(const fl_tagi_windows* windows, const float* deltas, float* images,
                            ptrdiff_t image_step, ptrdiff_t channel_step, float factor) {
  fl::tagi::kernels.spread_windows(*windows, deltas, images, image_step, channel_step, factor);
}

void fl_tagi_largest(const fl_tagi_windows* windows, const float* mean, const float* variance,
                     float* means, float* variances, int32_t* taken, ptrdiff_t image_step,
                     ptrdiff_t channel_step) {
  fl::tagi::kernels.largest(*windows, mean, variance, means, variances, taken, image_step,
                            channel_step);
}

void fl_tagi_spread_taken(const fl_tagi_windows* windows, const float* deltas,
                          ptrdiff_t image_step, ptrdiff_t channel_step, const int32_t* taken,
                          ptrdiff_t taken_image_step, ptrdiff_t taken_channel_step,
                          float* images) {
  fl::tagi::kernels.spread_taken(*windows, deltas, image_step, channel_step, taken,
                                 taken_image_step, taken_channel_step, images);
}
