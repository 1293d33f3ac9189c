/* The steps of optimizers on NumPy arrays, for flashlight_py/optim/rule.py.

   A step of a small model is a few microseconds long, and Python takes one to look at an array. So
   one call reads the variables, checks their arrays and steps them all. What does not fit (another
   dtype, strides, a subclass, another library's array) is left to the caller. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#include <numpy/arrayobject.h>

#include <cstring>
#include <memory>
#include <vector>

#include "optim.h"

namespace {

using fl::optim::MOST_NUMBERS;
using fl::optim::MOST_STATES;

// From here on steps are long enough to let other threads run meanwhile.
constexpr size_t BYTES_WITHOUT_GIL = 1 << 16;

struct Release {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;

PyObject *data_name, *grad_name, *placement_name;

// A rule and its numbers, as Python's rule() returns them.
struct Numbered {
  const fl::optim::Rule* rule = nullptr;
  double numbers[MOST_NUMBERS];
};

// A parameter's step: where its arrays are, and what keeps them.
struct Task {
  fl::optim::Piece piece;
  bool is_double;
  Py_ssize_t position;
  void* grad;  // where piece.grads points to when there is one
  Owned kept[2 + MOST_STATES];
};

bool read_rule(PyObject* given, Numbered* to) {
  PyObject* numbers = PyTuple_Check(given) ? PyTuple_GetItem(given, 1) : nullptr;
  const char* name = numbers ? PyUnicode_AsUTF8AndSize(PyTuple_GetItem(given, 0), nullptr) : nullptr;
  if (name == nullptr || !PyTuple_Check(numbers)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a rule is (name, (number, ...))");
    return false;
  }
  const fl::optim::Rule* rules = fl::optim::chosen_set().rules;
  to->rule = nullptr;
  for (int i = 0; i < fl::optim::RULES; ++i) {
    if (std::strcmp(rules[i].name, name) == 0) to->rule = &rules[i];
  }
  if (to->rule == nullptr || PyTuple_Size(numbers) != to->rule->numbers) {
    PyErr_Format(PyExc_ValueError, "no rule %s with %zd numbers", name, PyTuple_Size(numbers));
    return false;
  }
  for (int i = 0; i < to->rule->numbers; ++i) {
    to->numbers[i] = PyFloat_AsDouble(PyTuple_GetItem(numbers, i));
  }
  return PyErr_Occurred() == nullptr;
}

// An array that a kernel can read, of the dtype and shape of `like` unless that is null; or null.
PyArrayObject* readable(PyObject* object, PyArrayObject* like) {
  if (object == nullptr || !PyArray_CheckExact(object)) return nullptr;
  PyArrayObject* array = reinterpret_cast<PyArrayObject*>(object);
  if (!PyArray_ISCARRAY_RO(array)) return nullptr;
  const int type = PyArray_TYPE(array);
  if (like == nullptr) return type == NPY_FLOAT || type == NPY_DOUBLE ? array : nullptr;
  return type == PyArray_TYPE(like) && PyArray_SAMESHAPE(array, like) ? array : nullptr;
}

PyArrayObject* writable(PyObject* object, PyArrayObject* like) {
  PyArrayObject* array = readable(object, like);
  return array != nullptr && PyArray_ISWRITEABLE(array) ? array : nullptr;
}

bool overlap(PyArrayObject* one, PyArrayObject* other) {
  const char *a = PyArray_BYTES(one), *b = PyArray_BYTES(other);
  return a < b + PyArray_NBYTES(other) && b < a + PyArray_NBYTES(one);
}

// Take `param` (owned) as what the task steps; false: it does not fit.
bool take_param(Owned param, Task* task) {
  PyArrayObject* array = writable(param.get(), nullptr);
  if (array == nullptr) return false;
  task->piece.param = PyArray_DATA(array);
  task->piece.size = static_cast<size_t>(PyArray_SIZE(array));
  task->is_double = PyArray_TYPE(array) == NPY_DOUBLE;
  for (void*& state : task->piece.states) state = task->piece.param;  // of rules with fewer
  task->kept[0] = std::move(param);
  return true;
}

PyArrayObject* param_of(const Task& task) {
  return reinterpret_cast<PyArrayObject*>(task.kept[0].get());
}

// Take a gradient; one that is only not contiguous is copied.
bool take_grad(Owned grad, Task* task) {
  PyArrayObject* param = param_of(*task);
  if (grad != nullptr && PyArray_CheckExact(grad.get())) {
    PyArrayObject* array = reinterpret_cast<PyArrayObject*>(grad.get());
    if (PyArray_TYPE(array) == PyArray_TYPE(param) && !PyArray_ISCARRAY_RO(array)) {
      grad.reset(PyArray_NewCopy(array, NPY_CORDER));
    }
  }
  PyArrayObject* array = readable(grad.get(), param);
  if (array == nullptr || overlap(array, param)) return false;
  task->grad = PyArray_DATA(array);
  task->piece.slices = 1;
  task->kept[1] = std::move(grad);
  return true;
}

bool take_state(int number, PyObject* state, Task* task) {
  PyArrayObject* array = writable(state, param_of(*task));
  if (array == nullptr) return false;
  Py_INCREF(state);
  task->kept[2 + number].reset(state);
  task->piece.states[number] = PyArray_DATA(array);
  return true;
}

void run(const Task& task, const Numbered& rule, double scale, bool zero) {
  const fl::optim::Step step = task.is_double ? rule.rule->float64 : rule.rule->float32;
  fl::optim::Piece piece = task.piece;
  void* grad = task.grad;
  if (piece.grads == nullptr) piece.grads = &grad;
  step(piece, rule.numbers, scale, zero);
}

// An array of another kind may have its own way to do what `name` of this module does: then that was
// done, and `result` is what it returned.
bool is_deferred(PyObject* module, const char* name, PyObject* array, PyObject* args, PyObject** result) {
  *result = nullptr;
  if (array == nullptr || PyArray_CheckExact(array)) return false;
  Owned type(PyObject_Type(array));
  Owned own(type == nullptr ? nullptr : PyObject_GetAttrString(type.get(), "__operation__"));
  if (own == nullptr) {
    PyErr_Clear();
    return false;
  }
  Owned function(PyObject_GetAttrString(module, name)), options(PyDict_New());
  if (function == nullptr || options == nullptr || args == nullptr) return true;
  *result = PyObject_CallFunctionObjArgs(own.get(), function.get(), args, options.get(), nullptr);
  return true;
}

struct Steps {
  PyObject *params, *states, *times, *rule, *scale_object;
  double scale;
  bool per_position, sharded;
  std::vector<Task> tasks;
  Owned left;

  bool leave(Py_ssize_t position) {
    Owned number(PyLong_FromSsize_t(position));
    if (left == nullptr) left.reset(PyList_New(0));
    return left != nullptr && number != nullptr && PyList_Append(left.get(), number.get()) == 0;
  }

  // Whether parameter `position` fits, 1 or 0, into a task; 2: there is nothing to step, or its
  // placement steps it; 3: it has one, and the caller knows of none; -1: an error.
  int look(Py_ssize_t position, Task* task) {
    PyObject* variable = PyList_GetItem(params, position);
    if (variable == nullptr) return -1;
    Owned placement(PyObject_GetAttr(variable, placement_name));
    Owned grad(PyObject_GetAttr(variable, grad_name));
    if (placement == nullptr || grad == nullptr) return -1;
    if (placement.get() != Py_None) return sharded ? 2 : 3;
    if (grad.get() == Py_None) return 2;
    Owned data(PyObject_GetAttr(variable, data_name));
    if (data == nullptr) return -1;
    if (!take_param(std::move(data), task) || !take_grad(std::move(grad), task)) {
      return PyErr_Occurred() ? -1 : 0;
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(states); ++i) {
      PyObject* state = PyList_GetItem(PyTuple_GetItem(states, i), position);
      if (state == nullptr) return -1;
      if (!take_state(static_cast<int>(i), state, task)) return 0;
    }
    task->position = position;
    return 1;
  }

  // Look at all parameters before the first one changes. False: an error, or `refused`.
  bool look_at_all(bool* refused) {
    const Py_ssize_t count = PyList_Size(params);
    tasks.reserve(static_cast<size_t>(count));
    for (Py_ssize_t position = 0; position < count; ++position) {
      tasks.emplace_back();
      const int found = look(position, &tasks.back());
      if (found != 1) tasks.pop_back();
      switch (found) {
        case 0:
          if (!leave(position)) return false;
          break;
        case 1:  // it fits
        case 2:  // it is skipped
          break;
        case 3:
          *refused = true;
          left.reset();
          leave(position);
          return false;
        default:
          return false;
      }
    }
    return true;
  }

  // Count a step of parameter `position`; return which it is, or -1 with an error.
  long long count_step(Py_ssize_t position) {
    PyObject* before = PyList_GetItem(times, position);
    const long long time = before == nullptr ? -1 : PyLong_AsLongLong(before) + 1;
    if (time == 0 || before == nullptr) return -1;
    PyObject* now = PyLong_FromLongLong(time);
    return now == nullptr || PyList_SetItem(times, position, now) < 0 ? -1 : time;
  }

  bool ask(Py_ssize_t position, Numbered* numbered) {
    Owned number(PyLong_FromSsize_t(position));
    if (number == nullptr) return false;
    Owned answer(PyObject_CallFunctionObjArgs(rule, number.get(), scale_object, nullptr));
    if (answer == nullptr || !read_rule(answer.get(), numbered)) return false;
    if (numbered->rule->states != PyTuple_Size(states)) {
      PyErr_Format(PyExc_ValueError, "the rule %s has %d states, not %zd", numbered->rule->name,
                   numbered->rule->states, PyTuple_Size(states));
      return false;
    }
    return true;
  }

  bool run_all() {
    Numbered numbered;
    long long known = -1;
    for (const Task& task : tasks) {
      const long long time = count_step(task.position);
      if (time < 0) return false;
      if (time != known || per_position) {
        if (!ask(task.position, &numbered)) return false;
        known = time;
      }
      if (task.piece.size * sizeof(float) < BYTES_WITHOUT_GIL) {
        run(task, numbered, scale, false);
      } else {
        Py_BEGIN_ALLOW_THREADS;
        run(task, numbered, scale, false);
        Py_END_ALLOW_THREADS;
      }
    }
    return true;
  }
};

/* step(params, states, steps, rule, grad_scale, per_position, sharded): None, or the positions of the
   parameters that are left to the caller. One that has a placement is skipped where `sharded`, else it
   is returned alone and nothing was stepped. rule(position, grad_scale) is asked once for parameters
   that are at the same step, or for each. */
PyObject* step(PyObject* module, PyObject* const* args, Py_ssize_t count) {
  if (count != 7 || !PyList_Check(args[0]) || !PyTuple_Check(args[1]) || !PyList_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError,
                    "step(params, states, steps, rule, grad_scale, per_position, sharded)");
    return nullptr;
  }
  if (PyList_Size(args[0]) > 0) {
    Owned data(PyObject_GetAttr(PyList_GetItem(args[0], 0), data_name));
    if (data != nullptr && !PyArray_CheckExact(data.get())) {
      Owned all(PyTuple_New(count));
      for (Py_ssize_t i = 0; all != nullptr && i < count; ++i) {
        Py_INCREF(args[i]);
        PyTuple_SetItem(all.get(), i, args[i]);
      }
      PyObject* result;
      if (is_deferred(module, "step", data.get(), all.get(), &result)) return result;
    }
  }
  Steps steps{args[0], args[1], args[2], args[3], args[4], PyFloat_AsDouble(args[4]),
              args[5] == Py_True, args[6] == Py_True, {}, {}};
  if (PyErr_Occurred()) return nullptr;
  bool refused = false;
  if (PyTuple_Size(steps.states) > MOST_STATES) {
    PyErr_SetString(PyExc_ValueError, "a rule has at most three states");
    return nullptr;
  }
  if (!(steps.look_at_all(&refused) && steps.run_all()) && !refused) return nullptr;
  if (PyErr_Occurred()) return nullptr;
  if (steps.left != nullptr) return steps.left.release();
  Py_RETURN_NONE;
}

// The slices of a gradient, if all fit.
bool take_slices(PyObject* given, Task* task, std::vector<void*>* grads) {
  for (Py_ssize_t i = 0; i < PySequence_Size(given); ++i) {
    Owned slice(PySequence_GetItem(given, i));
    PyArrayObject* array = readable(slice.get(), param_of(*task));
    if (array == nullptr || overlap(array, param_of(*task))) return false;
    grads->push_back(PyArray_DATA(array));
  }
  return !grads->empty();
}

bool all_writable(PyObject* given, Task* task) {
  for (Py_ssize_t i = 0; i < PySequence_Size(given); ++i) {
    Owned slice(PySequence_GetItem(given, i));
    if (writable(slice.get(), param_of(*task)) == nullptr) return false;
  }
  return true;
}

/* change((rule, numbers), piece, grad_scale, zero): whether the piece fits and was stepped. It is
   (parameter, [gradients], *states); with `zero` the gradients are 0 afterwards. */
PyObject* change(PyObject* module, PyObject* args) {
  PyObject *rule, *piece, *grads;
  double scale;
  int zero;
  Numbered numbered;
  if (!PyArg_ParseTuple(args, "O!O!dp", &PyTuple_Type, &rule, &PyTuple_Type, &piece, &scale, &zero) ||
      !read_rule(rule, &numbered)) {
    return nullptr;
  }
  if (PyTuple_Size(piece) != 2 + numbered.rule->states ||
      !PyList_Check(grads = PyTuple_GetItem(piece, 1))) {
    PyErr_Format(PyExc_ValueError, "a piece of %s is (parameter, [gradients], %d states)",
                 numbered.rule->name, numbered.rule->states);
    return nullptr;
  }
  PyObject* param = PyTuple_GetItem(piece, 0);
  PyObject* result;
  if (is_deferred(module, "change", param, args, &result)) return result;
  Task task{};
  std::vector<void*> slices;
  Py_INCREF(param);
  bool fits = take_param(Owned(param), &task) && take_slices(grads, &task, &slices) &&
              (!zero || all_writable(grads, &task));
  for (int i = 0; fits && i < numbered.rule->states; ++i) {
    fits = take_state(i, PyTuple_GetItem(piece, 2 + i), &task);
  }
  if (PyErr_Occurred()) return nullptr;
  if (!fits) Py_RETURN_FALSE;
  task.piece.grads = slices.data();
  task.piece.slices = static_cast<int>(slices.size());
  Py_BEGIN_ALLOW_THREADS;  // the caller's tuple and list keep the arrays
  run(task, numbered, scale, zero);
  Py_END_ALLOW_THREADS;
  Py_RETURN_TRUE;
}

/* sum_of_squares(grad): a float, or None where the array does not fit. */
PyObject* sum_of_squares(PyObject* module, PyObject* grad) {
  Owned args(PyTuple_Pack(1, grad));
  PyObject* result;
  if (is_deferred(module, "sum_of_squares", grad, args.get(), &result)) return result;
  PyArrayObject* array = readable(grad, nullptr);
  if (array == nullptr) Py_RETURN_NONE;
  const fl::optim::Set& set = fl::optim::chosen_set();
  const auto squares = PyArray_TYPE(array) == NPY_DOUBLE ? set.float64 : set.float32;
  double sum;
  Py_BEGIN_ALLOW_THREADS;
  sum = squares(PyArray_DATA(array), static_cast<size_t>(PyArray_SIZE(array)));
  Py_END_ALLOW_THREADS;
  return PyFloat_FromDouble(sum);
}

/* use(name): the instruction set used until now; from now on `name`. For tests. */
PyObject* use(PyObject*, PyObject* name) {
  const char* before = fl::optim::chosen_set().name;
  const char* wanted = PyUnicode_AsUTF8AndSize(name, nullptr);
  if (wanted == nullptr) return nullptr;
  if (!fl::optim::choose(wanted)) {
    return PyErr_Format(PyExc_ValueError, "this processor has no instruction set %s", wanted);
  }
  return PyUnicode_FromString(before);
}

PyMethodDef methods[] = {{"step", (PyCFunction)(void (*)(void))step, METH_FASTCALL, nullptr},
                         {"change", change, METH_VARARGS, nullptr},
                         {"sum_of_squares", sum_of_squares, METH_O, nullptr},
                         {"use", use, METH_O, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_optim", nullptr, -1,     methods,
                          nullptr,               nullptr,  nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__optim(void) {
  import_array();
  data_name = PyUnicode_InternFromString("data");
  grad_name = PyUnicode_InternFromString("grad");
  placement_name = PyUnicode_InternFromString("placement");
  if (!data_name || !grad_name || !placement_name) return nullptr;
  return PyModule_Create(&definition);
}
