// Headers of the kernels' sources, and windows over images in NHWC order, from the sizes passed to kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "nn.h"

namespace fl::nn {

struct Windows {
  int64_t batch, height, width, channels, out_height, out_width, out_channels;
  int64_t kernel_y, kernel_x, stride_y, stride_x, pad_y, pad_x, step_y, step_x;  // step: dilation
  int64_t groups;

  explicit Windows(const int64_t* sizes) { std::memcpy(this, sizes, sizeof *this); }

  int64_t in_group() const { return channels / groups; }
  int64_t out_group() const { return out_channels / groups; }
  int64_t area() const { return kernel_y * kernel_x; }
  bool is_depthwise() const { return groups > 1 && in_group() * out_group() == 1; }

  // True if each pixel is in exactly one window.
  bool is_apart() const {
    return stride_y == kernel_y && stride_x == kernel_x && out_height * kernel_y == height &&
           out_width * kernel_x == width && pad_y == 0 && pad_x == 0 && step_y == 1 && step_x == 1;
  }
};

}  // namespace fl::nn
