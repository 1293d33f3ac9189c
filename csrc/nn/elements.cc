// Elementwise and row functions, and table look-ups, with their gradients.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "nn.h"

namespace fl::nn {
namespace {
enum { GELU, GELU_BY_TANH, SILU, SIGMOID, ERF, SOFTPLUS, ELU, LEAKY_RELU, RELU };
enum { VALUE, VALUE_AND_SLOPE, GRADIENT };
#define FL_KERNELS "csrc/nn/elements.inc"
#include "../common/each_set.inc"
}  // namespace

#define FL_MAPPED(name, function)                                     \
  FL_BOTH(name, "0 0", elementwise, , function, VALUE),        \
      FL_BOTH(name "_with_slope", "0 0 0", elementwise, , function, VALUE_AND_SLOPE)
const Row elements[] = {FL_BOTH("take_rows", "01 21 I0", take_rows),
                        FL_BOTH("add_rows", "21 01 I0", add_rows),
                        FL_BOTH("dropout", "0 0 I", dropout),
                        FL_MAPPED("gelu", GELU),
                        FL_MAPPED("gelu_by_tanh", GELU_BY_TANH),
                        FL_MAPPED("silu", SILU),
                        FL_MAPPED("sigmoid", SIGMOID),
                        FL_MAPPED("erf", ERF),
                        FL_MAPPED("softplus", SOFTPLUS),
                        FL_MAPPED("elu", ELU),
                        FL_MAPPED("leaky_relu", LEAKY_RELU),
                        FL_BOTH("relu_back", "0 0 0", elementwise, , RELU, GRADIENT),
                        FL_BOTH("softmax", "01 01", softmax, , false),
                        FL_BOTH("softmax_back", "01 01 01", softmax_back, , false),
                        FL_BOTH("log_softmax", "01 01", softmax, , true),
                        FL_BOTH("log_softmax_back", "01 01 01", softmax_back, , true),
                        {nullptr, nullptr, nullptr}};

}  // namespace fl::nn
