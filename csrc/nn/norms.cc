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

const Row norms[] = {FL_BOTH("layer_norm", false, layer_norm, , true),
                     FL_BOTH("rms_norm", false, layer_norm, , false),
                     FL_BOTH("layer_norm_back", false, layer_norm_back, , true),
                     FL_BOTH("rms_norm_back", false, layer_norm_back, , false),
                     FL_BOTH("group_norm", false, group_norm, , false),
                     FL_BOTH("group_norm_back", false, group_norm_back, , false),
                     FL_BOTH("given_norm", false, group_norm, , true),
                     FL_BOTH("given_norm_back", false, group_norm_back, , true),
                     {nullptr, nullptr, false}};

}  // namespace fl::nn
