// Kernels of layers on contiguous arrays, for flashlight_py/autograd/native.py and captured steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace fl::nn {

// A kernel reads its inputs and writes its results. `arrays`: addresses of the results, then of the inputs;
// null: an array that is not passed. Each kernel documents its `sizes` and `numbers`. All arrays are
// C-contiguous and do not overlap.
using Kernel = void(char* const* arrays, const int64_t* sizes, const double* numbers);

struct Row {
  Kernel* kernel;    // first field: csrc/tape reads it at the row's address
  const char* name;  // "layer_norm:f": the function and NumPy's letter of the dtype
  // For each array a word that tells its size. Each digit (base 36) is an index of `sizes`. The product of
  // these sizes is the number of elements; sizes after "/" are divisors. Elements have the row's dtype, but
  // are int64 after "I", bytes after "B".
  const char* arrays;
  bool needs_blas;
};

// Two rows of a table: `kernel` for float and for double. Its template arguments are the dtype, then `...`.
#define FL_BOTH(name, arrays, needs_blas, kernel, ...)                   \
  {FL_CHOSEN(kernel<float __VA_ARGS__>), name ":f", arrays, needs_blas}, \
      {FL_CHOSEN(kernel<double __VA_ARGS__>), name ":d", arrays, needs_blas}

// Tables of kernels, one per source file. The last row of a table has no name.
extern const Row convolutions[], pools[], norms[], attentions[], elements[];

// Let new NumPy arrays of this thread reuse freed blocks. Return false if an exception is set.
bool keep_freed();
// Begin a backward pass: unmap blocks that were not used in the last `passes` passes.
void begin_pass(size_t passes);
size_t kept_bytes();

// Addresses of NumPy's BLAS function gemm for float and double. is_long: gemm takes 64-bit integers.
struct Blas {
  void* gemm[2] = {};
  bool is_long = false;
};
extern Blas blas;

// c = alpha a @ b + beta c, m x n. Row-major, with row distance `_step`; a or b may be stored transposed.
template <typename R>
void gemm(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k, R alpha, const R* a,
          int64_t a_step, const R* b, int64_t b_step, R beta, R* c, int64_t c_step) {
  enum { ROW_MAJOR = 101, AS_IT_IS = 111 };  // values of cblas.h; 111: not transposed, 112: transposed
  const auto call = [&](auto zero) {
    using Int = decltype(zero);
    using Function = void (*)(int order, int a, int b, Int m, Int n, Int k, R alpha, const R*, Int, const R*,
                              Int, R beta, R*, Int);
    reinterpret_cast<Function>(blas.gemm[std::is_same_v<R, double>])(
        ROW_MAJOR, AS_IT_IS + a_transposed, AS_IT_IS + b_transposed, Int(m), Int(n), Int(k), alpha, a,
        Int(a_step), b, Int(b_step), beta, c, Int(c_step));
  };
  blas.is_long ? call(int64_t()) : call(int());
}

}  // namespace fl::nn
