#include "products.h"

namespace fl::tape {
namespace {
template <typename R>
void product(size_t m, size_t n, size_t k, const Matrix& a, const Matrix& b, const Matrix& c, bool adds) {
  for (size_t i = 0; i < m; ++i) {
    for (size_t j = 0; j < n; ++j) {
      R sum = 0;
      for (size_t l = 0; l < k; ++l) {
        sum += static_cast<R*>(a.data)[i * a.rows_step + l * a.columns_step] *
               static_cast<R*>(b.data)[l * b.rows_step + j * b.columns_step];
      }
      R& to = static_cast<R*>(c.data)[i * c.rows_step + j * c.columns_step];
      to = adds ? to + sum : sum;
    }
  }
}
}  // namespace
Product product_of(bool is_double) { return is_double ? product<double> : product<float>; }
}  // namespace fl::tape
