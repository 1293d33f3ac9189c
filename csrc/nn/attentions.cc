#include "nn.h"

namespace fl::nn {

const Row attentions[] = {{nullptr, nullptr, false}};

}  // namespace fl::nn
