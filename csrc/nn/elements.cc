// Elementwise and row functions, and table look-ups, with their gradients.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "nn.h"

namespace fl::nn {
namespace {
enum { GELU, GELU_BY_TANH, SILU, SIGMOID };
#define FL_KERNELS "csrc/nn/elements.inc"
#include "../common/each_set.inc"

// Arrays (result, table, indices), sizes (count, width, rows of the table): look up rows of the table.
template <typename R>
void take_rows(char* const* arrays, const int64_t* sizes, const double*) {
  const int64_t* index = reinterpret_cast<const int64_t*>(arrays[2]);
  const size_t width = size_t(sizes[1]) * sizeof(R);
  for (int64_t i = 0; i < sizes[0]; ++i) {
    std::memcpy(arrays[0] + size_t(i) * width, arrays[1] + size_t(index[i]) * width, width);
  }
}

// Arrays (result, rows, indices), sizes (count, width, rows of the result): add each row to result[index].
template <typename R>
void add_rows(char* const* arrays, const int64_t* sizes, const double*) {
  const int64_t count = sizes[0], width = sizes[1];
  R* to = reinterpret_cast<R*>(arrays[0]);
  const R* from = reinterpret_cast<const R*>(arrays[1]);
  const int64_t* index = reinterpret_cast<const int64_t*>(arrays[2]);
  std::memset(to, 0, size_t(sizes[2] * width) * sizeof(R));
  for (int64_t i = 0; i < count; ++i, from += width) {
    R* row = to + index[i] * width;
    for (int64_t k = 0; k < width; ++k) row[k] += from[k];
  }
}

}  // namespace

const Row elements[] = {{take_rows<float>, "take_rows:f", "01 21 I0", false},
                        {take_rows<double>, "take_rows:d", "01 21 I0", false},
                        {add_rows<float>, "add_rows:f", "21 01 I0", false},
                        {add_rows<double>, "add_rows:d", "21 01 I0", false},
                        FL_BOTH("dropout", "0 0 I", false, dropout),
                        FL_BOTH("gelu", "0 0", false, elementwise, , GELU, false),
                        FL_BOTH("gelu_with_slope", "0 0 0", false, elementwise, , GELU, true),
                        FL_BOTH("gelu_by_tanh", "0 0", false, elementwise, , GELU_BY_TANH, false),
                        FL_BOTH("gelu_by_tanh_with_slope", "0 0 0", false, elementwise, , GELU_BY_TANH, true),
                        FL_BOTH("silu", "0 0", false, elementwise, , SILU, false),
                        FL_BOTH("silu_with_slope", "0 0 0", false, elementwise, , SILU, true),
                        FL_BOTH("sigmoid", "0 0", false, elementwise, , SIGMOID, false),
                        FL_BOTH("sigmoid_with_slope", "0 0 0", false, elementwise, , SIGMOID, true),
                        FL_BOTH("softmax", "01 01", false, softmax, , false),
                        FL_BOTH("softmax_back", "01 01 01", false, softmax_back, , false),
                        FL_BOTH("log_softmax", "01 01", false, softmax, , true),
                        FL_BOTH("log_softmax_back", "01 01 01", false, softmax_back, , true),
                        {nullptr, nullptr, nullptr, false}};

}  // namespace fl::nn
