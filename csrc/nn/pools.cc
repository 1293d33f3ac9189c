#include "nn.h"

namespace fl::nn {

const Row pools[] = {{nullptr, nullptr, false}};

}  // namespace fl::nn
