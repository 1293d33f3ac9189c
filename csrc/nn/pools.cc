#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "nn.h"
#include "windows.h"

namespace fl::nn {
namespace {
enum { LARGEST, MEAN, MEAN_OF_ALL };
#define FL_KERNELS "csrc/nn/pools.inc"
#include "../common/each_set.inc"
}  // namespace

// The argument `sizes` of these kernels contains the fields of Windows.
const Row pools[] = {FL_BOTH("pool_largest", "0456 0123", pool, , LARGEST),
                     FL_BOTH("pool_spread_largest", "0123 0456 0123 0456", spread, , LARGEST),
                     FL_BOTH("pool_mean", "0456 0123", pool, , MEAN),
                     FL_BOTH("pool_mean_of_all", "0456 0123", pool, , MEAN_OF_ALL),
                     FL_BOTH("pool_spread_mean", "0123 0456", spread, , MEAN),
                     FL_BOTH("pool_spread_mean_of_all", "0123 0456", spread, , MEAN_OF_ALL),
                     {nullptr, nullptr, nullptr}};

}  // namespace fl::nn
