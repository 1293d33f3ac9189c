#include "sets.h"

namespace fl::baseline {
#include "kernels.inc"
}  // namespace fl::baseline
