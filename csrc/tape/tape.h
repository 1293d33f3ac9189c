// A captured step as a list of instructions over fixed memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace fl::tape {

// Addresses of the operands. Instructions name operands by index, so that each call can use other addresses.
using Table = char* const*;

enum class Outcome { done, failed, left };  // failed: a Python exception; left: a Require is false

class Instruction {
 public:
  virtual ~Instruction() = default;
  virtual Outcome run(Table table) = 0;
  // Approximate number of elements that the instruction processes. -1: the instruction needs the GIL.
  virtual int64_t work() const = 0;
  virtual bool may_leave() const { return false; }
};

using Instructions = std::vector<std::unique_ptr<Instruction>>;

// Signature of the loops of NumPy's ufuncs.
using Loop = void (*)(char** args, const intptr_t* count, const intptr_t* steps, void* data);

enum { MOST_OPERANDS = 4, MOST_DIMENSIONS = 8 };

// One elementwise operation. `steps`: bytes between elements, for each dimension of the group.
struct Elementwise {
  Loop loop;
  void* data;
  int operands;
  bool sums;  // a sum of the first operand; last operation of its group
  int at[MOST_OPERANDS];
  intptr_t steps[MOST_OPERANDS][MOST_DIMENSIONS];
  intptr_t itemsize[MOST_OPERANDS];  // 0: the operand is memory of one strip, reused by all strips

  // Bytes between consecutive elements or rows of the outermost dimension.
  intptr_t ahead(int operand) const { return itemsize[operand] == 0 ? 0 : steps[operand][0]; }
};

// Return an instruction for operations over the same elements. It runs them strip by strip, so that
// intermediate results stay in cache. A group of several operations may have at most two dimensions.
std::unique_ptr<Instruction> group(std::vector<Elementwise> operations, const std::vector<intptr_t>& dimensions);

// A reduction of `rows` x `columns` with a ufunc's loop, like in NumPy. along_rows: one result per row, else
// one per column. Results start from the value at `initial`, or from the first element if `initial` is null.
struct Reduction final : public Instruction {
  Loop loop;
  void* data;
  int from, to;
  intptr_t rows, columns, itemsize;
  bool along_rows;
  const char* initial;

  Outcome run(Table table) override;
  int64_t work() const override { return rows * columns; }
};

// Addresses of BLAS functions. is_long: the functions take 64-bit integers.
struct Blas {
  void *gemm[2] = {}, *gemv[2] = {}, *dot[2] = {};  // index 0: float, 1: double
  bool is_long = false;
};
extern Blas blas;

using Kernel = void(char* const* arrays, const int64_t* sizes, const double* numbers);

// Find a kernel of this folder by name, for float ("gemm:f4") or double ("gemm:f8"); null if unknown. Arrays
// are row-major unless transposed; steps are in elements. Each line has a name: the arrays; the sizes.
//   gemm: a, b, c = a @ b; 1 if a is transposed, 1 if b is, rows of c, columns of c, inner size, steps of a, b.
//   gemv: matrix, x, y = matrix @ x; 1 if row-major, 1 if transposed, rows, columns, step, step of x.
//   dot: x, y, sum of products; count, steps of x and y.
//   outer: a, b, c[i, j] = 0 + a[i] * b[j]; 1 if a is one number, 2 if b is, else 0; rows, columns, a's step.
//   add_rows: a matrix, the sum of its rows; rows, columns.
Kernel* own_kernel(const char* name);

// Find an elementwise loop of this folder by name; null if unknown. Names are casts ("cast:f4:f8"), copies
// with an element size ("copy:8"), selections ("where:8"), and limits ("maximum:f4").
Loop own_loop(const char* name);

}  // namespace fl::tape
