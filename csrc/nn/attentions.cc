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

const Row attentions[] = {FL_BOTH("attention", false, attention),
                          FL_BOTH("attention_back", false, attention_back, , false),
                          FL_BOTH("packed_attention_back", false, attention_back, , true),
                          {nullptr, nullptr, false}};

}  // namespace fl::nn
