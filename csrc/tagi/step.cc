#include <algorithm>
#include <cmath>
#include <cstddef>

#include "tagi.h"

namespace fl::tagi::steps {
namespace {
#define FL_KERNELS "csrc/tagi/step.inc"
#include "../common/each_set.inc"

const auto step = FL_CHOSEN(step);
}  // namespace
}  // namespace fl::tagi::steps

void fl_tagi_step(float* mean, float* variance, const float* mean_sum, const float* variance_sum,
                  size_t size, float inverse_cap) {
  fl::tagi::steps::step(mean, variance, mean_sum, variance_sum, size, inverse_cap);
}
