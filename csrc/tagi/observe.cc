#include <cmath>
#include <cstddef>
#include <cstdint>

#include "tagi.h"

void fl_tagi_observe(const fl_tagi_outputs* outputs, const int64_t* indices, const float* observed,
                     const float* errors, size_t errors_step, float* d, float* e) {
  for (size_t i = 0; i < outputs->observed; ++i) {
    size_t place = i;
    if (indices != nullptr) {
      const size_t sample = i / outputs->observed_each;
      place = sample * outputs->each + static_cast<size_t>(indices[i] - 1);
    }
    const float variance = outputs->variance == nullptr ? 0 : outputs->variance[place];
    const float slope = outputs->slope == nullptr ? 1 : outputs->slope[place];
    const float gain = slope / (variance + errors[i * errors_step]);
    const float mean_delta = gain * (observed[i] - outputs->mean[place]);
    const float variance_delta = -gain * slope;
    const bool learnt = std::isfinite(mean_delta) && std::isfinite(variance_delta);
    d[place] = learnt ? mean_delta : 0;
    e[place] = learnt ? variance_delta : 0;
  }
}
