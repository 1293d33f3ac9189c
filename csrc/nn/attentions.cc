#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "nn.h"

namespace fl::nn {
namespace {
#define FL_KERNELS "csrc/nn/attentions.inc"
#include "../common/each_set.inc"
}  // namespace

const Row attentions[] = {FL_BOTH("attention", true, attention),
                          FL_BOTH("attention_back", true, attention_back, , false),
                          FL_BOTH("packed_attention_back", true, attention_back, , true),
                          {nullptr, nullptr, false}};

}  // namespace fl::nn
