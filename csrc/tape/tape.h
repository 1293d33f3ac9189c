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
  int at[MOST_OPERANDS];
  intptr_t steps[MOST_OPERANDS][MOST_DIMENSIONS];
  intptr_t itemsize[MOST_OPERANDS];
};

// Operations over the same elements, one after the other, strip by strip: what one leaves for the
// next is still in cache. Several operations need at most two dimensions.
std::unique_ptr<Instruction> group(std::vector<Elementwise> operations,
                                   const std::vector<intptr_t>& dimensions);

// A reduction by a ufunc's loop as NumPy makes it, of `rows` x `columns`: along each row, or down
// the columns. Every result begins with the bytes at `initial`, or with the first element if null.
struct Reduction {
  Loop loop;
  void* data;
  int from, to;
  intptr_t rows, columns, row_step, column_step, result_step, itemsize;
  bool along_rows;
  const char* initial;
};
std::unique_ptr<Instruction> reduce(const Reduction& reduction);

// The sum of rows of floats or doubles, whose columns lie side by side; the step is in elements.
std::unique_ptr<Instruction> add_rows(bool is_double, int from, int to, intptr_t rows,
                                      intptr_t columns, intptr_t row_step);

// An elementwise loop of our own by its name, or null: casts ("cast:f4:f8"), copies of elements
// of a size ("copy:8"), selections ("where:8").
Loop own_loop(const char* name);

}  // namespace fl::tape
