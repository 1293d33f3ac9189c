#include "tagi.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

namespace fl::tagi {
namespace {

#define FL_KERNELS "csrc/tagi/kernels.inc"
#include "../common/each_set.inc"

const auto lstm_forward = FL_CHOSEN(lstm_forward);
const auto lstm_backward = FL_CHOSEN(lstm_backward);
const auto step = FL_CHOSEN(step);
const auto patches = FL_CHOSEN(patches);
const auto add_patches = FL_CHOSEN(add_patches);
const auto sum_windows = FL_CHOSEN(sum_windows);
const auto spread_windows = FL_CHOSEN(spread_windows);
const auto largest = FL_CHOSEN(largest);
const auto spread_taken = FL_CHOSEN(spread_taken);
const auto mixture_relu = FL_CHOSEN(mixture_relu);
const auto mixture_between = FL_CHOSEN(mixture_between);
const auto row_sums = FL_CHOSEN(row_sums);
const auto row_squares = FL_CHOSEN(row_squares);
const auto standardize = FL_CHOSEN(standardize);
const auto standardize_back = FL_CHOSEN(standardize_back);

// Run `run`; return 0, or -1 if there is not enough memory.
template <typename Run>
int with_room(Run run) noexcept {
  try {
    run();
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

}  // namespace

extern "C" {

int fl_tagi_lstm_forward(const fl_tagi_lstm* lstm, const float* weight, const float* weight_variance,
                         const float* bias, const float* bias_variance, const float* x, const float* x_variance,
                         float* h, float* h_variance, float* joined, float* slopes, float* states) {
  return with_room([&] {
    lstm_forward(*lstm, weight, weight_variance, bias, bias_variance, x, x_variance, h, h_variance, joined, slopes,
                 states);
  });
}

int fl_tagi_lstm_backward(const fl_tagi_lstm* lstm, const float* weight, const float* slopes, const float* d,
                          const float* e, float* dz, float* ez, float* dx, float* ex) {
  return with_room([&] { lstm_backward(*lstm, weight, slopes, d, e, dz, ez, dx, ex); });
}

void fl_tagi_step(float* mean, float* variance, const float* mean_sum, const float* variance_sum, size_t size,
                  float inverse_cap) {
  step(mean, variance, mean_sum, variance_sum, size, inverse_cap);
}

void fl_tagi_patches(const fl_tagi_windows* windows, const float* mean, const float* variance, float* means,
                     float* variances, float* moments) {
  patches(*windows, mean, variance, means, variances, moments);
}

void fl_tagi_add_patches(const fl_tagi_windows* windows, const float* from, float* images) {
  add_patches(*windows, from, images);
}

int fl_tagi_sum_windows(const fl_tagi_windows* windows, const float* images, float* sums, ptrdiff_t image_step,
                        ptrdiff_t channel_step, float factor) {
  return with_room([&] { sum_windows(*windows, images, sums, image_step, channel_step, factor); });
}

int fl_tagi_spread_windows(const fl_tagi_windows* windows, const float* deltas, float* images, ptrdiff_t image_step,
                           ptrdiff_t channel_step, float factor) {
  return with_room([&] { spread_windows(*windows, deltas, images, image_step, channel_step, factor); });
}

void fl_tagi_largest(const fl_tagi_windows* windows, const float* mean, const float* variance, float* means,
                     float* variances, int32_t* taken, ptrdiff_t image_step, ptrdiff_t channel_step) {
  largest(*windows, mean, variance, means, variances, taken, image_step, channel_step);
}

void fl_tagi_spread_taken(const fl_tagi_windows* windows, const float* deltas, ptrdiff_t image_step,
                          ptrdiff_t channel_step, const int32_t* taken, ptrdiff_t taken_image_step,
                          ptrdiff_t taken_channel_step, float* images) {
  spread_taken(*windows, deltas, image_step, channel_step, taken, taken_image_step, taken_channel_step, images);
}

void fl_tagi_mixture_relu(const float* mean, const float* variance, float* mean_out, float* variance_out,
                          float* slope_out, size_t size) {
  mixture_relu(mean, variance, mean_out, variance_out, slope_out, size);
}

void fl_tagi_mixture_between(const float* mean, const float* variance, float* mean_out, float* variance_out,
                             float* slope_out, size_t size, float share, float shift) {
  mixture_between(mean, variance, mean_out, variance_out, slope_out, size, share, shift);
}

void fl_tagi_row_sums(const fl_tagi_rows* rows, const float* units, double* sums) { row_sums(*rows, units, sums); }

void fl_tagi_row_squares(const fl_tagi_rows* rows, const float* units, const float* centers, double* sums) {
  row_squares(*rows, units, centers, sums);
}

void fl_tagi_standardize(const fl_tagi_rows* rows, const float* mean, const float* variance,
                         const fl_tagi_affine* affine, float* t_out, float* mean_out, float* variance_out) {
  standardize(*rows, mean, variance, affine, t_out, mean_out, variance_out);
}

void fl_tagi_standardize_back(const fl_tagi_rows* rows, const float* t, const float* d, const float* e,
                              const float* slope, const float* back, double* sums, float* d_out, float* e_out) {
  standardize_back(*rows, t, d, e, slope, back, sums, d_out, e_out);
}

void fl_tagi_observe(const fl_tagi_outputs* outputs, const int64_t* indices, const float* observed,
                     const float* errors, size_t errors_step, float* d, float* e) {
  for (size_t i = 0; i < outputs->observed; ++i) {
    size_t position = i;
    if (indices != nullptr) {
      const size_t sample = i / outputs->observed_per_sample;
      position = sample * outputs->per_sample + static_cast<size_t>(indices[i] - 1);
    }
    const float variance = outputs->variance == nullptr ? 0 : outputs->variance[position];
    const float slope = outputs->slope == nullptr ? 1 : outputs->slope[position];
    const float gain = slope / (variance + errors[i * errors_step]);
    const float mean_delta = gain * (observed[i] - outputs->mean[position]);
    const float variance_delta = -gain * slope;
    const bool learnt = std::isfinite(mean_delta) && std::isfinite(variance_delta);
    d[position] = learnt ? mean_delta : 0;
    e[position] = learnt ? variance_delta : 0;
  }
}

}  // extern "C"
}  // namespace fl::tagi
