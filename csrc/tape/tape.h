// A captured step as a list of instructions over memory that stays where it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace fl::tape {

// Where each operand begins. An instruction names operands by their place in this table, so that
// the arrays that a step is called with can lie elsewhere each time.
using Table = char* const*;

enum class Outcome { done, failed, left };  // failed: a Python exception; left: the step took another path

class Instruction {
 public:
  virtual ~Instruction() = default;
  virtual Outcome run(Table table) = 0;
  // Roughly how many elements it touches; -1: it needs the interpreter.
  virtual int64_t work() const = 0;
  virtual bool may_leave() const { return false; }
};

using Instructions = std::vector<std::unique_ptr<Instruction>>;

// The signature of the loops inside NumPy's ufuncs.
using Loop = void (*)(char** args, const intptr_t* count, const intptr_t* steps, void* data);

enum { MOST_OPERANDS = 4, MOST_DIMENSIONS = 8 };

// One elementwise operation. `steps` are in bytes, for each dimension of the group.
struct Elementwise {
  Loop loop;
  void* data;
  int operands;
  bool sums;  // all elements of the first operand; it is the last one of its group
  int at[MOST_OPERANDS];
  intptr_t steps[MOST_OPERANDS][MOST_DIMENSIONS];
  intptr_t itemsize[MOST_OPERANDS];  // 0: it has room for one strip, which all use in turn

  // Bytes between what two strips have, for each element or row of the first one.
  intptr_t ahead(int operand) const { return itemsize[operand] == 0 ? 0 : steps[operand][0]; }
};

// Operations over the same elements, one after the other, strip by strip: what one leaves for the
// next is still in cache. Several operations need at most two dimensions.
std::unique_ptr<Instruction> group(std::vector<Elementwise> operations,
                                   const std::vector<intptr_t>& dimensions);

// A reduction by a ufunc's loop as NumPy makes it, of `rows` x `columns`: along each row, or down
// the columns. Every result begins with the bytes at `initial`, or with the first element if null.
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

// The functions' addresses, and whether their integers have 64 bits.
struct Blas {
  void *gemm[2] = {}, *gemv[2] = {}, *dot[2] = {};  // for float and for double
  bool is_long = false;
};
extern Blas blas;

// A kernel of csrc/nn, or one of our own.
using Kernel = void(char* const* arrays, const int64_t* sizes, const double* numbers);

// A kernel of our own by its name, for floats ("gemm:f4") or doubles ("gemm:f8"), or null. Arrays are
// row-major unless they are transposed; steps are in elements. Names, arrays, and sizes:
//   gemm: a, b, c = a @ b. Is a transposed, is b, rows and columns of c, terms of each, steps of a and b.
//   gemv: matrix, x, y = matrix @ x. Is it row-major, is it transposed, its rows, columns and step, step of x.
//   dot: x, y, the sum of products. Count, steps of x and y.
//   outer: a, b, c[i, j] = 0 + a[i] * b[j]. 1 if a is one number, 2 if b is, else 0; rows, columns, step of a.
//   add_rows: a matrix, the sum of its rows. Rows, columns.
Kernel* own_kernel(const char* name);

// An elementwise loop of our own by its name, or null: casts ("cast:f4:f8"), copies of elements
// of a size ("copy:8"), selections ("where:8").
Loop own_loop(const char* name);

}  // namespace fl::tape
