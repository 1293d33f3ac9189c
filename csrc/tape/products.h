// Matrix products.
#pragma once

#include <cstddef>

namespace fl::tape {

// Elements, with steps in elements.
struct Matrix {
  void* data;
  ptrdiff_t rows_step, columns_step;
};

// c = a @ b, or c += where `adds`: a is m x k, b is k x n, c is m x n and overlaps neither.
using Product = void (*)(size_t m, size_t n, size_t k, const Matrix& a, const Matrix& b,
                         const Matrix& c, bool adds);

Product product_of(bool is_double);

}  // namespace fl::tape
