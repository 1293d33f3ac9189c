#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "tagi.h"

namespace fl::tagi::images {
namespace {
#define FL_KERNELS "csrc/tagi/patches.inc"
#include "../common/each_set.inc"

const auto patches = FL_CHOSEN(patches);
const auto add_patches = FL_CHOSEN(add_patches);
const auto sum_windows = FL_CHOSEN(sum_windows);
const auto spread_windows = FL_CHOSEN(spread_windows);
const auto largest = FL_CHOSEN(largest);
const auto spread_taken = FL_CHOSEN(spread_taken);
}  // namespace
}  // namespace fl::tagi::images

void fl_tagi_patches(const fl_tagi_windows* windows, const float* mean, const float* variance,
                     float* means, float* variances, float* moments) {
  fl::tagi::images::patches(*windows, mean, variance, means, variances, moments);
}

void fl_tagi_add_patches(const fl_tagi_windows* windows, const float* patches, float* images) {
  fl::tagi::images::add_patches(*windows, patches, images);
}

int fl_tagi_sum_windows(const fl_tagi_windows* windows, const float* images, float* sums,
                         ptrdiff_t image_step, ptrdiff_t channel_step, float factor) {
  return fl::tagi::with_room([&] {
    fl::tagi::images::sum_windows(*windows, images, sums, image_step, channel_step, factor);
  });
}

int fl_tagi_spread_windows(const fl_tagi_windows* windows, const float* deltas, float* images,
                            ptrdiff_t image_step, ptrdiff_t channel_step, float factor) {
  return fl::tagi::with_room([&] {
    fl::tagi::images::spread_windows(*windows, deltas, images, image_step, channel_step, factor);
  });
}

void fl_tagi_largest(const fl_tagi_windows* windows, const float* mean, const float* variance,
                     float* means, float* variances, int32_t* taken, ptrdiff_t image_step,
                     ptrdiff_t channel_step) {
  fl::tagi::images::largest(*windows, mean, variance, means, variances, taken, image_step,
                            channel_step);
}

void fl_tagi_spread_taken(const fl_tagi_windows* windows, const float* deltas,
                          ptrdiff_t image_step, ptrdiff_t channel_step, const int32_t* taken,
                          ptrdiff_t taken_image_step, ptrdiff_t taken_channel_step,
                          float* images) {
  fl::tagi::images::spread_taken(*windows, deltas, image_step, channel_step, taken,
                                 taken_image_step, taken_channel_step, images);
}
