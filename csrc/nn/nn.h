// Kernels of layers on contiguous arrays, for flashlight_py/autograd/native.py and captured steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

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
};

// Two rows of a table: `kernel` for float and for double. Its template arguments are the dtype, then `...`.
#define FL_BOTH(name, arrays, kernel, ...)                   \
  {FL_CHOSEN(kernel<float __VA_ARGS__>), name ":f", arrays}, \
      {FL_CHOSEN(kernel<double __VA_ARGS__>), name ":d", arrays}

// Tables of kernels, one per source file. The last row of a table has no name.
extern const Row convolutions[], layers[];

// Let new NumPy arrays of this thread reuse freed blocks. Return false if an exception is set.
bool keep_freed();
// Begin a backward pass: unmap blocks that were not used in the last `passes` passes.
void begin_pass(size_t passes);
size_t kept_bytes();

// Return a number of threads for so many multiplications: at most the number that NumPy's OpenBLAS uses.
int64_t threads_for(int64_t products);
// Call `call` with 0 to `count` - 1, each in a thread of its own, or in this one if the system has no more
// threads. Threads end here, so that a process may fork. Throw the exception of a call.
void in_threads(int64_t count, const std::function<void(int64_t)>& call);

}  // namespace fl::nn
