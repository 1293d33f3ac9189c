#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tagi.h"

namespace fl::tagi::lstm {
namespace {
#define FL_KERNELS "csrc/tagi/lstm.inc"
#include "../common/each_set.inc"

const auto forward = FL_CHOSEN(forward);
const auto backward = FL_CHOSEN(backward);
}  // namespace
}  // namespace fl::tagi::lstm

int fl_tagi_lstm_forward(const fl_tagi_lstm* lstm, const float* weight,
                          const float* weight_variance, const float* bias,
                          const float* bias_variance, const float* x, const float* x_variance,
                          float* h, float* h_variance, float* joined, float* slopes,
                          float* states) {
  return fl::tagi::with_room([&] {
    fl::tagi::lstm::forward(*lstm, weight, weight_variance, bias, bias_variance, x, x_variance, h,
                            h_variance, joined, slopes, states);
  });
}

int fl_tagi_lstm_backward(const fl_tagi_lstm* lstm, const float* weight, const float* slopes,
                           const float* d, const float* e, float* dz, float* ez, float* dx,
                           float* ex) {
  return fl::tagi::with_room([&] {
    fl::tagi::lstm::backward(*lstm, weight, slopes, d, e, dz, ez, dx, ex);
  });
}
