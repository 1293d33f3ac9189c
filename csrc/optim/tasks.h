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
#include <vector>

#include "optim.h"

namespace fl::optim {

struct Release {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;

inline Owned new_reference(PyObject* object) {
  Py_XINCREF(object);
  return Owned(object);
}

// What a field of a rule is: by FORMS in flashlight_py/optim/cpu.py, or the number `a`.
enum Form { LR, SHRINK, RATE, ROOT, INVERSE, FORMS, NUMBER = FORMS };
struct Field {
  Form form;
  double a, b;
};

struct Fields {
  const Rule* rule;
  Field each[MOST_NUMBERS];
};

// What steps are done with. The rate, the counts of steps and the squared norms (null: the rule has
// none), one for each parameter, are read and written where the optimizer has them.
struct Source {
  Fields fields;
  const double* lr;
  npy_int64* counts;
  double* norms;
  npy_intp params;
  double scale;
  Owned kept[3];
};

// A parameter's step: where its arrays are, and what keeps them.
struct Task {
  Piece piece;
  bool is_double;
  Py_ssize_t position;
  Owned kept[2 + MOST_STATES];
};

// Read (name, (field, ...)): a field is a number or (form, number, ...). False with an exception.
bool read_rule(PyObject* given, Fields* to);
// Read lr, counts, norms, rule and scale. False with an exception.
bool read_source(PyObject* const* given, Source* to);

// An array that a kernel can read, of the dtype and shape of `like` unless that is null; or null.
PyArrayObject* readable(PyObject* object, PyArrayObject* like);

// Take `param` as what the task steps; false: it does not fit.
bool take_param(Owned param, Task* task);
PyArrayObject* param_of(const Task& task);
// Take a gradient; one that is only not contiguous is copied, if it may be.
bool take_grad(Owned grad, Task* task, bool may_copy);
bool take_state(int number, PyObject* state, Task* task);

// Step all tasks, and count the steps; false with an exception.
bool run_all(const std::vector<Task>& tasks, const Source& source);
void run(const Task& task, const Rule& rule, const double* numbers, double scale);

// Steps(pieces, lr, counts, norms, rule, scale), for a method table.
PyObject* prepare(PyObject* module, PyObject* const* args, Py_ssize_t count);

}  // namespace fl::optim

#endif
