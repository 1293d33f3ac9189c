// Pools, norms, elementwise and row functions, table look-ups, attention and recurrent layers.

#include "kernels.h"

namespace fl::nn {
namespace {
enum { GELU, GELU_BY_TANH, SILU, SIGMOID, ERF, SOFTPLUS, ELU, LEAKY_RELU, RELU };
enum { VALUE, VALUE_AND_SLOPE, GRADIENT };
enum { TANH, GRU, LSTM };
#define FL_KERNELS "csrc/nn/layers.inc"
#include "../common/each_set.inc"
}  // namespace

#define FL_MAPPED(name, function)                       \
  FL_BOTH(name, "0 0", elementwise, , function, VALUE), \
      FL_BOTH(name "_with_slope", "0 0 0", elementwise, , function, VALUE_AND_SLOPE)
#define FL_RECURRENT(name, kind)                                   \
  FL_BOTH(name, "062 014 015 35 32 3 3 02 02", recurrent, , kind), \
      FL_BOTH(name "_back", "017 018 02 02 062 014 062 35 32 02", recurrent_back, , kind)

// The argument `sizes` of kernels of pools contains the fields of Windows.
const Row layers[] = {
    FL_BOTH("take_rows", "01 21 I0", take_rows),
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
    FL_BOTH("pool_largest", "0456 0456 0123", largest),
    FL_BOTH("pool_spread_largest", "0123 0456 0456", spread_largest),
    FL_BOTH("pool_mean", "0456 0123", mean, , false, false),
    FL_BOTH("pool_mean_of_all", "0456 0123", mean, , true, false),
    FL_BOTH("pool_spread_mean", "0123 0456", mean, , false, true),
    FL_BOTH("pool_spread_mean_of_all", "0123 0456", mean, , true, true),
    FL_BOTH("layer_norm", "01 0 0 01 1 1", layer_norm, , true),
    FL_BOTH("rms_norm", "01 0 0 01 1 1", layer_norm, , false),
    FL_BOTH("layer_norm_back", "01 1 1 01 01 0 0 1", layer_norm_back, , true),
    FL_BOTH("rms_norm_back", "01 1 1 01 01 0 0 1", layer_norm_back, , false),
    FL_BOTH("group_norm", "0123 04 04 0123 2 2", group_norm, , false),
    FL_BOTH("group_norm_back", "0123 2 2 0123 0123 04 04 2", group_norm_back, , false),
    FL_BOTH("given_norm", "0123 0123 2 2 2 2", group_norm, , true),
    FL_BOTH("given_norm_back", "0123 2 2 0123 0123 04 04 2", group_norm_back, , true),
    FL_BOTH("attention", "0215 012 0124 0134 0135 Bo I", attention),
    FL_BOTH("attention_back", "0124 0134 0135 0215 0215 012 0124 0134 0135 Bo I", attention_back, , false),
    FL_BOTH("packed_attention_back", "02b 0215 0215 012 02b 02b 02b Bo I", attention_back, , true),
    FL_RECURRENT("tanh", TANH),
    FL_RECURRENT("gru", GRU),
    FL_RECURRENT("lstm", LSTM),
    {nullptr, nullptr, nullptr}};

}  // namespace fl::nn
