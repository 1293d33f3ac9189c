#include "nn.h"

namespace fl::nn {

const Row convolutions[] = {{nullptr, nullptr, false}};

}  // namespace fl::nn
