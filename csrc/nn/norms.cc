#include "nn.h"

namespace fl::nn {

const Row norms[] = {{nullptr, nullptr, false}};

}  // namespace fl::nn
