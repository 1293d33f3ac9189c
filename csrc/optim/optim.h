// The steps of optimizers: kernels for one dtype each, for the instruction sets of the processor.

#ifndef FL_OPTIM_H
#define FL_OPTIM_H

#include <cstddef>

namespace fl::optim {

enum { MOST_STATES = 3, MOST_NUMBERS = 9, RULES = 9 };

// The arrays of a step, of which a kernel changes all but the gradient.
struct Piece {
  void* param;
  const void* grad;
  void* states[MOST_STATES];
  size_t size;
};

// One step: `numbers` are those of the rule.
using Step = void (*)(const Piece&, const double* numbers, double scale);

struct Rule {
  const char* name;
  int states, numbers;
  Step float32, float64;
};

// As sum_of_squares() in flashlight_py/optim/cpu.py.
using Squares = double (*)(const void* grad, size_t size);

struct Set {
  const char* name;
  const Rule* rules;  // RULES
  Squares float32, float64;
};

// The set that is used: the best that the processor has, or that which choose() has chosen.
const Set& chosen_set();

// Use another set, for tests; false: there is none of this name, or the processor lacks it.
bool choose(const char* name);

}  // namespace fl::optim

#endif
