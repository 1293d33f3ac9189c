/* The steps of optimizers on NumPy arrays, for flashlight_py/optim/rule.py.

   A step of a small model is a few microseconds long, and Python takes one to look at an array. So
   one call reads the variables, checks their arrays and steps them all. What does not fit (another
   dtype, strides, a subclass, another library's array) is left to the caller. */

#define FL_OPTIM_MODULE
#include "tasks.h"

#include <vector>

namespace fl::optim {
namespace {

PyObject *data_name, *grad_name, *placement_name;

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
  PyObject *params, *states;
  std::vector<Task> tasks;
  Owned left;

  bool leave(Py_ssize_t position) {
    Owned number(PyLong_FromSsize_t(position));
    if (left == nullptr) left.reset(PyList_New(0));
    return left != nullptr && number != nullptr && PyList_Append(left.get(), number.get()) == 0;
  }

  // Whether parameter `position` fits, 1 or 0, into a task; 2: there is nothing to step; 3: it has a
  // placement, of which the caller does not know; -1: an error.
  int look(Py_ssize_t position, Task* task) {
    PyObject* variable = PyList_GetItem(params, position);
    if (variable == nullptr) return -1;
    Owned placement(PyObject_GetAttr(variable, placement_name));
    Owned grad(PyObject_GetAttr(variable, grad_name));
    if (placement == nullptr || grad == nullptr) return -1;
    if (placement.get() != Py_None) return 3;
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
};

// As is_deferred(), by the array of the first parameter; one that is sharded gathers its own to show it.
bool is_step_deferred(PyObject* module, PyObject* const* args, Py_ssize_t count, PyObject** result) {
  if (PyList_Size(args[0]) == 0) return false;
  PyObject* variable = PyList_GetItem(args[0], 0);
  Owned placement(PyObject_GetAttr(variable, placement_name));
  if (placement == nullptr || placement.get() != Py_None) return false;
  Owned data(PyObject_GetAttr(variable, data_name));
  if (data == nullptr || PyArray_CheckExact(data.get())) return false;
  Owned all(PyTuple_New(count));
  for (Py_ssize_t i = 0; all != nullptr && i < count; ++i) {
    Py_INCREF(args[i]);
    PyTuple_SetItem(all.get(), i, args[i]);
  }
  return is_deferred(module, "step", data.get(), all.get(), result);
}

/* step(params, states, steps, rule, grad_scale, per_position): None, or the positions of the parameters
   that are left to the caller. One that has a placement is returned alone, and nothing was stepped.
   rule(position, grad_scale) is asked once for parameters that are at the same step, or for each. */
PyObject* step(PyObject* module, PyObject* const* args, Py_ssize_t count) {
  if (count != 6 || !PyList_Check(args[0]) || !PyTuple_Check(args[1]) || !PyList_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "step(params, states, steps, rule, grad_scale, per_position)");
    return nullptr;
  }
  PyObject* result;
  if (is_step_deferred(module, args, count, &result)) return result;
  Steps steps{args[0], args[1], {}, {}};
  const Asking asking{args[2], args[3], args[4], args[5] == Py_True, PyTuple_Size(args[1])};
  const double scale = PyFloat_AsDouble(args[4]);
  if (PyErr_Occurred()) return nullptr;
  bool refused = false;
  if (PyTuple_Size(steps.states) > MOST_STATES) {
    PyErr_SetString(PyExc_ValueError, "a rule has at most three states");
    return nullptr;
  }
  if (!(steps.look_at_all(&refused) &&
        run_all(steps.tasks.data(), steps.tasks.size(), asking, scale)) &&
      !refused) {
    return nullptr;
  }
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

/* change((rule, numbers), piece, grad_scale): whether the piece fits and was stepped. It is
   (parameter, [gradients], *states). */
PyObject* change(PyObject* module, PyObject* args) {
  PyObject *rule, *piece, *grads;
  double scale;
  Numbered numbered;
  if (!PyArg_ParseTuple(args, "O!O!d", &PyTuple_Type, &rule, &PyTuple_Type, &piece, &scale) ||
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
  bool fits = take_param(Owned(param), &task) && take_slices(grads, &task, &slices);
  for (int i = 0; fits && i < numbered.rule->states; ++i) {
    fits = take_state(i, PyTuple_GetItem(piece, 2 + i), &task);
  }
  if (PyErr_Occurred()) return nullptr;
  if (!fits) Py_RETURN_FALSE;
  task.piece.grads = slices.data();
  task.piece.slices = static_cast<int>(slices.size());
  Py_BEGIN_ALLOW_THREADS;  // the caller's tuple and list keep the arrays
  run(task, numbered, scale);
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
  const Set& set = chosen_set();
  const auto squares = PyArray_TYPE(array) == NPY_DOUBLE ? set.float64 : set.float32;
  double sum;
  Py_BEGIN_ALLOW_THREADS;
  sum = squares(PyArray_DATA(array), static_cast<size_t>(PyArray_SIZE(array)));
  Py_END_ALLOW_THREADS;
  return PyFloat_FromDouble(sum);
}

/* use(name): the instruction set used until now; from now on `name`. For tests. */
PyObject* use(PyObject*, PyObject* name) {
  const char* before = chosen_set().name;
  const char* wanted = PyUnicode_AsUTF8AndSize(name, nullptr);
  if (wanted == nullptr) return nullptr;
  if (!choose(wanted)) {
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
}  // namespace fl::optim

PyMODINIT_FUNC PyInit__optim(void) {
  using namespace fl::optim;
  import_array();
  data_name = PyUnicode_InternFromString("data");
  grad_name = PyUnicode_InternFromString("grad");
  placement_name = PyUnicode_InternFromString("placement");
  if (!data_name || !grad_name || !placement_name) return nullptr;
  PyObject* module = PyModule_Create(&definition);
  PyObject* type = module == nullptr ? nullptr : steps_type();
  if (type == nullptr || PyModule_AddObject(module, "Steps", type) < 0) {
    Py_XDECREF(type);
    Py_XDECREF(module);
    return nullptr;
  }
  return module;
}
