// An optimizer's step of NumPy arrays: what is common to those who read them by NumPy's C API.

#ifndef FL_OPTIM_TASKS_H
#define FL_OPTIM_TASKS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL flashlight_optim
#ifndef FL_OPTIM_MODULE
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include <memory>

#include "optim.h"

namespace fl::optim {

// From here on steps are long enough to let other threads run meanwhile.
constexpr size_t BYTES_WITHOUT_GIL = 1 << 16;

struct Release {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;

// A rule and its numbers, as Python's rule() returns them.
struct Numbered {
  const Rule* rule = nullptr;
  double numbers[MOST_NUMBERS];
};

// A parameter's step: where its arrays are, and what keeps them.
struct Task {
  Piece piece;
  bool is_double;
  Py_ssize_t position;
  void* grad;  // where piece.grads points to when there is one
  Owned kept[2 + MOST_STATES];
};

// Read a rule; false with an exception.
bool read_rule(PyObject* given, Numbered* to);

// An array that a kernel can read, of the dtype and shape of `like` unless that is null; or null.
PyArrayObject* readable(PyObject* object, PyArrayObject* like);
PyArrayObject* writable(PyObject* object, PyArrayObject* like);
bool overlap(PyArrayObject* one, PyArrayObject* other);

// Take `param` (owned) as what the task steps; false: it does not fit.
bool take_param(Owned param, Task* task);
PyArrayObject* param_of(const Task& task);
// Take a gradient; one that is only not contiguous is copied, if it may be.
bool take_grad(Owned grad, Task* task, bool may_copy = true);
bool take_state(int number, PyObject* state, Task* task);

// How an optimizer's steps are counted, and how each is done: times[position] is how many there
// were, rule(position, scale) the rule. With `per_position` it is asked for each parameter.
struct Asking {
  PyObject *times, *rule, *scale;
  bool per_position;
  Py_ssize_t states;
};

// Step all tasks; false with an exception.
bool run_all(const Task* tasks, size_t count, const Asking& asking, double scale);
void run(const Task& task, const Numbered& rule, double scale);

// The type Steps; null with an exception.
PyObject* steps_type();

}  // namespace fl::optim

#endif
