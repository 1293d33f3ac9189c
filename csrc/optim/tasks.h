// Reading of an optimizer step's NumPy arrays with NumPy's C API.

#pragma once

#include <vector>

#include "../common/numpy.h"
#include "optim.h"

namespace fl::optim {

// A field of an update rule: the number `a` if `form` is NUMBER, else an expression of FORMS in optim/cpu.py.
enum Form { LR, SHRINK, RATE, ROOT, INVERSE, FORMS, NUMBER = FORMS };
struct Field {
  Form form;
  double a, b;
};

struct Fields {
  const Rule* rule;
  Field field_list[MOST_NUMBERS];
};

// Inputs that all parameters share. `lr`, `counts` and `norms` point to the optimizer's arrays. `counts` and
// `norms` have one number per parameter. `norms` is null if the rule has no norms.
struct Source {
  Fields fields;
  const double* lr;
  npy_int64* counts;
  double* norms;
  npy_intp params;
  double scale;
  Owned kept[3];
};

// A parameter's step: addresses of its arrays, and references that keep them alive.
struct Task {
  Piece piece;
  bool is_double;
  Py_ssize_t position;
  Owned kept[2 + MOST_STATES];
};

// Read (name, (field, ...)); a field is a number or (form, number, ...). Return false if an exception is set.
bool read_rule(PyObject* python_object, Fields* to);
// Read lr, counts, norms, rule and scale. Return false if an exception is set.
bool read_source(PyObject* const* python_object, Source* to);

// Return `object` if a kernel can read it and it has the dtype and shape of `like` (null: any); else null.
PyArrayObject* readable(PyObject* object, PyArrayObject* like);

// Set the parameter of `task`. Return false if kernels do not support the array `param`.
bool take_param(Owned param, Task* task);
// Set the gradient of `task`. If `may_copy`, a non-contiguous gradient is copied.
bool take_grad(Owned grad, Task* task, bool may_copy);
bool take_state(int number, PyObject* state, Task* task);
// Set the arrays of `task` from the tuple (..., parameter, gradient, *states) of `states` states.
bool take_arrays(PyObject* tuple, int states, Task* task);

// Run all tasks and count the steps. Return false if an exception is set.
bool run_all(const std::vector<Task>& tasks, const Source& source);
void run(const Task& task, const Rule& rule, const double* numbers, double scale);

// The Python function Steps(pieces, lr, counts, norms, rule, scale): see prepared.cc.
PyObject* prepare(PyObject* module, PyObject* const* args, Py_ssize_t count);

}  // namespace fl::optim
