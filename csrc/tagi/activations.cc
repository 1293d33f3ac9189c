#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "tagi.h"

namespace fl::tagi::activations {
namespace {
#define FL_KERNELS "csrc/tagi/activations.inc"
#include "../common/each_set.inc"

const auto mixture_relu = FL_CHOSEN(mixture_relu);
const auto mixture_between = FL_CHOSEN(mixture_between);
}  // namespace
}  // namespace fl::tagi::activations

void fl_tagi_mixture_relu(const float* mean, const float* variance, float* mean_out,
                          float* variance_out, float* slope_out, size_t size) {
  fl::tagi::activations::mixture_relu(mean, variance, mean_out, variance_out, slope_out, size);
}

void fl_tagi_mixture_between(const float* mean, const float* variance, float* mean_out,
                             float* variance_out, float* slope_out, size_t size, float share,
                             float shift) {
  fl::tagi::activations::mixture_between(mean, variance, mean_out, variance_out, slope_out, size,
                                         share, shift);
}
