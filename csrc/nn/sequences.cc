#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>

#include "nn.h"

namespace fl::nn {
namespace {
enum { TANH, GRU, LSTM };
#define FL_KERNELS "csrc/nn/sequences.inc"
#include "../common/each_set.inc"
}  // namespace

#define FL_RECURRENT(name, kind)                                                     \
  FL_BOTH(name, "062 014 015 35 32 3 3 02 02", recurrent, , kind), \
      FL_BOTH(name "_back", "017 018 02 02 062 014 062 35 32 02", recurrent_back, , kind)
const Row sequences[] = {FL_BOTH("attention", "0215 012 0124 0134 0135 Bo I", attention),
                         FL_BOTH("attention_back", "0124 0134 0135 0215 0215 012 0124 0134 0135 Bo I", attention_back, , false),
                         FL_BOTH("packed_attention_back", "02b 0215 0215 012 02b 02b 02b Bo I", attention_back, , true),
                         FL_RECURRENT("tanh", TANH),
                         FL_RECURRENT("gru", GRU),
                         FL_RECURRENT("lstm", LSTM),
                         {nullptr, nullptr, nullptr}};

}  // namespace fl::nn
