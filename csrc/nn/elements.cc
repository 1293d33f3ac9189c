// Functions of elements and of rows, and rows of a table by numbers, with their gradients.

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

// (result, table, indices), sizes (count, width): rows of the table.
template <typename R>
void take_rows(char* const* arrays, const int64_t* sizes, const double*) {
  const int64_t* index = reinterpret_cast<const int64_t*>(arrays[2]);
  const size_t width = size_t(sizes[1]) * sizeof(R);
  for (int64_t i = 0; i < sizes[0]; ++i) {
    std::memcpy(arrays[0] + size_t(i) * width, arrays[1] + size_t(index[i]) * width, width);
  }
}

// (result, rows, indices), sizes (count, width, rows of the result): each row added to where it is from.
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

const Row elements[] = {{"take_rows:f", take_rows<float>, false},
                        {"take_rows:d", take_rows<double>, false},
                        {"add_rows:f", add_rows<float>, false},
                        {"add_rows:d", add_rows<double>, false},
                        FL_BOTH("dropout", false, dropout),
                        FL_BOTH("gelu", false, each, , GELU, false),
                        FL_BOTH("gelu_with_slope", false, each, , GELU, true),
                        FL_BOTH("gelu_by_tanh", false, each, , GELU_BY_TANH, false),
                        FL_BOTH("gelu_by_tanh_with_slope", false, each, , GELU_BY_TANH, true),
                        FL_BOTH("silu", false, each, , SILU, false),
                        FL_BOTH("silu_with_slope", false, each, , SILU, true),
                        FL_BOTH("sigmoid", false, each, , SIGMOID, false),
                        FL_BOTH("sigmoid_with_slope", false, each, , SIGMOID, true),
                        FL_BOTH("softmax", false, softmax, , false),
                        FL_BOTH("softmax_back", false, softmax_back, , false),
                        FL_BOTH("log_softmax", false, softmax, , true),
                        FL_BOTH("log_softmax_back", false, softmax_back, , true),
                        {nullptr, nullptr, false}};

}  // namespace fl::nn
