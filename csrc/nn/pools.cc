#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "nn.h"
#include "windows.h"

namespace fl::nn {
namespace {
#define FL_KERNELS "csrc/nn/pools.inc"
#include "../common/each_set.inc"
}  // namespace

// The argument `sizes` of these kernels contains the fields of Windows.
const Row pools[] = {FL_BOTH("pool_largest", "0456 0456 0123", largest),
                     FL_BOTH("pool_spread_largest", "0123 0456 0456", spread_largest),
                     FL_BOTH("pool_mean", "0456 0123", mean, , false, false),
                     FL_BOTH("pool_mean_of_all", "0456 0123", mean, , true, false),
                     FL_BOTH("pool_spread_mean", "0123 0456", mean, , false, true),
                     FL_BOTH("pool_spread_mean_of_all", "0123 0456", mean, , true, true),
                     {nullptr, nullptr, nullptr}};

}  // namespace fl::nn
