#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "nn.h"

namespace fl::nn {
namespace {
#define FL_KERNELS "csrc/nn/norms.inc"
#include "../common/each_set.inc"
}  // namespace

#define FL_BOTH(name, kernel, option)                            \
  {name ":f", FL_CHOSEN(kernel<float, option>), false},          \
      {name ":d", FL_CHOSEN(kernel<double, option>), false}
const Row norms[] = {FL_BOTH("layer_norm", layer_norm, true),
                     FL_BOTH("rms_norm", layer_norm, false),
                     FL_BOTH("layer_norm_back", layer_norm_back, true),
                     FL_BOTH("rms_norm_back", layer_norm_back, false),
                     FL_BOTH("group_norm", group_norm, false),
                     FL_BOTH("group_norm_back", group_norm_back, false),
                     FL_BOTH("given_norm", group_norm, true),
                     FL_BOTH("given_norm_back", group_norm_back, true),
                     {nullptr, nullptr, false}};

}  // namespace fl::nn
