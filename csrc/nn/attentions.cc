#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>

#include "nn.h"

namespace fl::nn {
namespace {
#define FL_KERNELS "csrc/nn/attentions.inc"
#include "../common/each_set.inc"
}  // namespace

const Row attentions[] = {FL_BOTH("attention", "0215 012 0124 0134 0135 Bo I", attention),
                          FL_BOTH("attention_back", "0124 0134 0135 0215 0215 012 0124 0134 0135 Bo I", attention_back, , false),
                          FL_BOTH("packed_attention_back", "02b 0215 0215 012 02b 02b 02b Bo I", attention_back, , true),
                          {nullptr, nullptr, nullptr}};

}  // namespace fl::nn
