// Pooling, in the sets of instructions that processors have.

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "nn.h"
#include "windows.h"

namespace fl::nn {
namespace {
namespace pooling {
#define FL_KERNELS "csrc/nn/pools.inc"
#include "../common/each_set.inc"
}  // namespace pooling
using namespace pooling;
}  // namespace

// Sizes: Windows.
const Row pools[] = {{"pool_largest:f", FL_CHOSEN(largest<float>), false},
                     {"pool_largest:d", FL_CHOSEN(largest<double>), false},
                     {"pool_spread_largest:f", FL_CHOSEN(spread_largest<float>), false},
                     {"pool_spread_largest:d", FL_CHOSEN(spread_largest<double>), false},
                     {"pool_mean:f", FL_CHOSEN(mean<float, false>), false},
                     {"pool_mean:d", FL_CHOSEN(mean<double, false>), false},
                     {"pool_mean_of_all:f", FL_CHOSEN(mean<float, true>), false},
                     {"pool_mean_of_all:d", FL_CHOSEN(mean<double, true>), false},
                     {"pool_spread_mean:f", FL_CHOSEN(spread_mean<float, false>), false},
                     {"pool_spread_mean:d", FL_CHOSEN(spread_mean<double, false>), false},
                     {"pool_spread_mean_of_all:f", FL_CHOSEN(spread_mean<float, true>), false},
                     {"pool_spread_mean_of_all:d", FL_CHOSEN(spread_mean<double, true>), false},
                     {nullptr, nullptr, false}};

}  // namespace fl::nn
