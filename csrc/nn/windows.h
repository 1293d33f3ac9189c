// Windows over images in NHWC order, in the order of the numbers that kernels are given.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace fl::nn {

struct Windows {
  int64_t batch, height, width, channels, out_height, out_width, out_channels;
  int64_t kernel_y, kernel_x, stride_y, stride_x, pad_y, pad_x, step_y, step_x;  // step: dilation
  int64_t groups;

  explicit Windows(const int64_t* sizes) { std::memcpy(this, sizes, sizeof *this); }

  int64_t positions() const { return batch * out_height * out_width; }
  int64_t in_group() const { return channels / groups; }
  int64_t out_group() const { return out_channels / groups; }
  int64_t area() const { return kernel_y * kernel_x; }
};

// The places of a window whose first lies at `at`, `step` apart, that are inside 0 .. size.
struct Span {
  int64_t begin, end;

  Span(int64_t at, int64_t step, int64_t count, int64_t size)
      : begin(at >= 0 ? 0 : std::min((step - 1 - at) / step, count)),
        end(size > at ? std::min((size - at + step - 1) / step, count) : 0) {}
};

// Calls back with the image, row and column of each output in turn, and its number.
template <typename Call>
void each_position(const Windows& w, int64_t first, int64_t last, Call call) {
  int64_t x = first % w.out_width, row = first / w.out_width;
  int64_t y = row % w.out_height, image = row / w.out_height;
  for (int64_t at = first; at < last; ++at) {
    call(image, y, x, at);
    if (++x < w.out_width) continue;
    x = 0;
    if (++y < w.out_height) continue;
    y = 0;
    ++image;
  }
}

// Calls back with each place of each window that is inside its image: the numbers of the pixel, of the
// output and of the place, how many came before it, and how many there are.
template <typename Call>
void each_place(const Windows& w, Call call) {
  each_position(w, 0, w.positions(), [&](int64_t image, int64_t oy, int64_t ox, int64_t at) {
    const int64_t top = oy * w.stride_y - w.pad_y, left = ox * w.stride_x - w.pad_x;
    const Span rows(top, w.step_y, w.kernel_y, w.height), columns(left, w.step_x, w.kernel_x, w.width);
    const int64_t count = (rows.end - rows.begin) * (columns.end - columns.begin);
    int64_t before = 0;
    for (int64_t ky = rows.begin; ky < rows.end; ++ky) {
      for (int64_t kx = columns.begin; kx < columns.end; ++kx, ++before) {
        const int64_t pixel = (image * w.height + top + ky * w.step_y) * w.width + left + kx * w.step_x;
        call(pixel, at, ky * w.kernel_x + kx, before, count);
      }
    }
  });
}

}  // namespace fl::nn
