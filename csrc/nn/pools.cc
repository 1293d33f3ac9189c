// Pooling, in the sets of instructions that processors have.

#include <algorithm>
#include <cstring>
#include <vector>

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

// Sizes: Windows; of a mean also whether padding counts.
const Row pools[] = {{"pool_largest:f", FL_CHOSEN(largest<float>), false},
                     {"pool_largest:d", FL_CHOSEN(largest<double>), false},
                     {"pool_spread_largest:f", FL_CHOSEN(spread_largest<float>), false},
                     {"pool_spread_largest:d", FL_CHOSEN(spread_largest<double>), false},
                     {"pool_mean:f", FL_CHOSEN(mean<float>), false},
                     {"pool_mean:d", FL_CHOSEN(mean<double>), false},
                     {"pool_spread_mean:f", FL_CHOSEN(spread_mean<float>), false},
                     {"pool_spread_mean:d", FL_CHOSEN(spread_mean<double>), false},
                     {nullptr, nullptr, false}};

}  // namespace fl::nn
