#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tagi.h"

// As in tagi.cc: the same loops for several instruction sets, chosen when the module is loaded.

namespace fl::tagi {
namespace lstm_baseline {
#include "lstm.inc"
}  // namespace lstm_baseline

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("avx2")
namespace lstm_avx2 {
#include "lstm.inc"
}  // namespace lstm_avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
namespace lstm_avx512 {
#include "lstm.inc"
}  // namespace lstm_avx512
#pragma GCC pop_options
#define FL_SEVERAL_KERNELS 1
#endif

namespace {

struct Kernels {
  decltype(&lstm_baseline::forward) forward;
  decltype(&lstm_baseline::backward) backward;
};

Kernels choose() {
#ifdef FL_SEVERAL_KERNELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq")) {
    return {lstm_avx512::forward, lstm_avx512::backward};
  }
  if (__builtin_cpu_supports("avx2")) return {lstm_avx2::forward, lstm_avx2::backward};
#endif
  return {lstm_baseline::forward, lstm_baseline::backward};
}

const Kernels kernels = choose();

}  // namespace
}  // namespace fl::tagi

void fl_tagi_lstm_forward(const fl_tagi_lstm* lstm, const float* weight,
                          const float* weight_variance, const float* bias,
                          const float* bias_variance, const float* x, const float* x_variance,
                          float* h, float* h_variance, float* joined, float* slopes,
                          float* states) {
  fl::tagi::kernels.forward(*lstm, weight, weight_variance, bias, bias_variance, x, x_variance, h,
                            h_variance, joined, slopes, states);
}

void fl_tagi_lstm_backward(const fl_tagi_lstm* lstm, const float* weight, const float* slopes,
                           const float* d, const float* e, float* dz, float* ez, float* dx,
                           float* ex) {
  fl::tagi::kernels.backward(*lstm, weight, slopes, d, e, dz, ez, dx, ex);
}
