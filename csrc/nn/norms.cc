#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "nn.h"

namespace fl::nn {
namespace {
#define FL_KERNELS "csrc/nn/norms.inc"
#include "../common/each_set.inc"
}  // namespace

const Row norms[] = {FL_BOTH("layer_norm", "01 0 0 01 1 1", layer_norm, , true),
                     FL_BOTH("rms_norm", "01 0 0 01 1 1", layer_norm, , false),
                     FL_BOTH("layer_norm_back", "01 1 1 01 01 0 0 1", layer_norm_back, , true),
                     FL_BOTH("rms_norm_back", "01 1 1 01 01 0 0 1", layer_norm_back, , false),
                     FL_BOTH("group_norm", "0123 04 04 0123 2 2", group_norm, , false),
                     FL_BOTH("group_norm_back", "0123 2 2 0123 0123 04 04 2", group_norm_back, , false),
                     FL_BOTH("given_norm", "0123 0123 2 2 2 2", group_norm, , true),
                     FL_BOTH("given_norm_back", "0123 2 2 0123 0123 04 04 2", group_norm_back, , true),
                     {nullptr, nullptr, nullptr}};

}  // namespace fl::nn
