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

#define FL_BOTH(name, kernel, ...)                                        \
  {name ":f", FL_CHOSEN(kernel<float __VA_ARGS__>), true},                \
      {name ":d", FL_CHOSEN(kernel<double __VA_ARGS__>), true}
const Row attentions[] = {FL_BOTH("attention", attention),
                          FL_BOTH("attention_back", attention_back, , false),
                          FL_BOTH("packed_attention_back", attention_back, , true),
                          {nullptr, nullptr, false}};

}  // namespace fl::nn
