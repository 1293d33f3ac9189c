#include "kernels.h"

namespace fl::nn {
namespace {
#define FL_KERNELS "csrc/nn/convolutions.inc"
#include "../common/each_set.inc"
}  // namespace

// The argument `sizes` of these kernels contains the fields of Windows.
const Row convolutions[] = {
    FL_BOTH("conv_forward", "0456 0123 6378/f 6", forward),
    FL_BOTH("conv_to_input", "0123 0456 6378/f", to_input),
    FL_BOTH("conv_to_weight", "6378/f 0456 0123", to_weight),
    {nullptr, nullptr, nullptr}};

}  // namespace fl::nn
