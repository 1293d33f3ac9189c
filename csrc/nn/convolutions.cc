// Convolutions, in the sets of instructions that processors have.

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "nn.h"
#include "windows.h"

namespace fl::nn {
namespace {
namespace convolving {
#define FL_KERNELS "csrc/nn/convolutions.inc"
#include "../common/each_set.inc"
}  // namespace convolving
using namespace convolving;
}  // namespace

// Sizes: Windows.
const Row convolutions[] = {
    {"conv_forward:f", FL_CHOSEN(forward<float>), true},
    {"conv_forward:d", FL_CHOSEN(forward<double>), true},
    {"conv_to_input:f", FL_CHOSEN(to_input<float>), true},
    {"conv_to_input:d", FL_CHOSEN(to_input<double>), true},
    {"conv_to_weight:f", FL_CHOSEN(to_weight<float>), true},
    {"conv_to_weight:d", FL_CHOSEN(to_weight<double>), true},
    {"conv_to_bias:f", FL_CHOSEN(to_bias<float>), false},
    {"conv_to_bias:d", FL_CHOSEN(to_bias<double>), false},
    {nullptr, nullptr, false}};

}  // namespace fl::nn
