// Matrix products by the BLAS that NumPy has loaded, as NumPy calls it: the same bits.
#pragma once

#include <cstdint>
#include <memory>

#include "tape.h"

namespace fl::tape {

// The functions' addresses, and whether their integers have 64 bits.
struct Blas {
  void *gemm[2] = {}, *gemv[2] = {}, *dot[2] = {};  // for float and for double
  bool is_long = false;
};

extern Blas blas;

// As cblas.h has them.
enum { ROW_MAJOR = 101, COLUMN_MAJOR = 102, AS_IT_IS = 111, TRANSPOSED = 112 };

// c = a @ b, all row-major but where they are transposed; c is m x n.
struct Gemm {
  int is_double, transposed_a, transposed_b, a, b, c;
  int64_t m, n, k, a_step, b_step, c_step;
};

// y = matrix @ x; steps in elements.
struct Gemv {
  int is_double, order, transposed, matrix, x, y;
  int64_t rows, columns, matrix_step, x_step;
};

// The sum of products of two vectors.
struct Dot {
  int is_double, x, y, to;
  int64_t count, x_step, y_step;
};

// c[i, j] = 0 + a[i] * b[j]: nothing is added up. Steps in elements; those of b are 1.
struct Outer {
  int is_double, scalar, a, b, c;  // scalar: a is one number: 1, b is one: 2
  int64_t m, n, a_step, c_step;
};

std::unique_ptr<Instruction> multiply(const Gemm& gemm);
std::unique_ptr<Instruction> multiply(const Gemv& gemv);
std::unique_ptr<Instruction> multiply(const Dot& dot);
std::unique_ptr<Instruction> multiply(const Outer& outer);

}  // namespace fl::tape
