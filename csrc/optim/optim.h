// Optimizer steps: kernels per dtype and instruction set.

#pragma once

#include <cstddef>

namespace fl::optim {

enum { MOST_STATES = 3, MOST_NUMBERS = 9, RULES = 9 };

// The arrays of one parameter's step. A kernel changes all of them except the gradient.
struct Piece {
  void* param;
  const void* grad;
  void* states[MOST_STATES];
  size_t size;
};

// Run one step on the arrays of a parameter. `numbers`: values of the rule's fields.
using Step = void (*)(const Piece&, const double* numbers, double scale);

struct Rule {
  const char* name;
  int states, numbers;
  Step float32, float64;
};

// Return the sum of squares, like sum_of_squares() in flashlight_py/optim/cpu.py.
using Squares = double (*)(const void* grad, size_t size);

struct Set {
  const char* name;
  const Rule* rules;  // an array of RULES entries
  Squares float32, float64;
};

// The instruction set in use: the best that the processor supports, or the last argument of choose().
const Set& chosen_set();

// For tests: use the set `name`. Return false if it is unknown or the processor does not support it.
bool choose(const char* name);

}  // namespace fl::optim
