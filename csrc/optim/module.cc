/* Optimizer steps on NumPy arrays, for flashlight_py/optim/optimizer.py.

   A step of a small model takes a few microseconds, and Python takes one to inspect an array. Therefore one
   call reads the variables, checks their arrays and updates all of them. The caller handles unsupported
   arrays: other dtypes, strides, subclasses, arrays of other libraries. */

#define FL_MODULE
#include "tasks.h"

namespace fl::optim {
namespace {

PyObject *data_name, *grad_name, *placement_name, *changed_name;

enum Support { FAILED, FITS, DIFFERS, UNUSED, PLACED };

// Check a parameter. If a kernel supports it, fill `task`.
Support check_parameter(PyObject* variable, PyObject* states, Task* task) {
  Owned placement(PyObject_GetAttr(variable, placement_name));
  if (placement == nullptr) return FAILED;
  if (placement.get() != Py_None) return PLACED;
  Owned grad(PyObject_GetAttr(variable, grad_name));
  if (grad == nullptr) return FAILED;
  if (grad.get() == Py_None) return UNUSED;
  Owned data(PyObject_GetAttr(variable, data_name));
  bool fits = data != nullptr && take_param(std::move(data), task) &&
              take_grad(std::move(grad), task, true);
  for (Py_ssize_t i = 0; fits && i < PyTuple_Size(states); ++i) {
    PyObject* state = PyList_GetItem(PyTuple_GetItem(states, i), task->position);
    fits = state != nullptr && take_state(static_cast<int>(i), state, task);
  }
  return fits ? FITS : PyErr_Occurred() ? FAILED : DIFFERS;
}

/* step(params, states, lr, counts, norms, rule, grad_scale, change): return None, or the positions of
   parameters that the caller must handle. If a parameter has a placement, return its position only, without
   any update. `change` is assigned to the attribute "changed" of updated parameters. */
PyObject* step(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 8 || !PyList_Check(args[0]) || !PyTuple_Check(args[1])) {
    return PyErr_Format(PyExc_TypeError, "step(params, states, lr, counts, norms, rule, grad_scale, change)");
  }
  PyObject *params = args[0], *states = args[1];
  Source source{};
  if (!read_source(args + 2, &source)) return nullptr;
  if (PyTuple_Size(states) != source.fields.rule->states) {
    return PyErr_Format(PyExc_ValueError, "the rule %s expects %d states, got %zd",
                        source.fields.rule->name, source.fields.rule->states, PyTuple_Size(states));
  }
  if (PyList_Size(params) > source.params) {
    return PyErr_Format(PyExc_IndexError, "expected counts of %zd parameters, got %zd",
                        PyList_Size(params), source.params);
  }
  std::vector<Task> tasks;
  tasks.reserve(static_cast<size_t>(PyList_Size(params)));
  Owned unsupported;
  for (Py_ssize_t position = 0; position < PyList_Size(params); ++position) {
    tasks.emplace_back().position = position;
    const Support support = check_parameter(PyList_GetItem(params, position), states, &tasks.back());
    if (support == FAILED) return nullptr;
    if (support == PLACED) return Py_BuildValue("[n]", position);
    if (support != FITS) tasks.pop_back();
    if (support != DIFFERS) continue;
    Owned number(PyLong_FromSsize_t(position));
    if (unsupported == nullptr) unsupported.reset(PyList_New(0));
    if (!unsupported || !number || PyList_Append(unsupported.get(), number.get()) < 0) return nullptr;
  }
  if (!run_all(tasks, source)) return nullptr;
  for (const Task& task : tasks) {
    PyObject* variable = PyList_GetItem(params, task.position);
    if (PyObject_SetAttr(variable, changed_name, args[7]) < 0) return nullptr;
  }
  return unsupported != nullptr ? unsupported.release() : Py_NewRef(Py_None);
}

/* change((rule, numbers), piece, grad_scale): update (parameter, gradient, *states). False: not supported. */
PyObject* change(PyObject*, PyObject* args) {
  PyObject *rule, *piece;
  double scale;
  Fields fields;
  if (!PyArg_ParseTuple(args, "O!O!d", &PyTuple_Type, &rule, &PyTuple_Type, &piece, &scale) ||
      !read_rule(rule, &fields)) {
    return nullptr;
  }
  const int states = fields.rule->states;
  if (PyTuple_Size(piece) != 2 + states) {
    return PyErr_Format(PyExc_ValueError, "a piece of %s is (parameter, gradient, %d states)",
                        fields.rule->name, states);
  }
  double numbers[MOST_NUMBERS];
  for (int i = 0; i < fields.rule->numbers; ++i) numbers[i] = fields.field_list[i].a;
  Task task{};
  const bool fits = take_arrays(piece, states, &task);
  if (PyErr_Occurred()) return nullptr;
  if (!fits) Py_RETURN_FALSE;
  Py_BEGIN_ALLOW_THREADS;
  run(task, *fields.rule, numbers, scale);
  Py_END_ALLOW_THREADS;
  Py_RETURN_TRUE;
}

/* sum_of_squares(grad): return a float, or None if the array is not supported. */
PyObject* sum_of_squares(PyObject*, PyObject* grad) {
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

/* use(name): use this instruction set from now on and return the previous one. For tests. */
PyObject* use(PyObject*, PyObject* name) {
  const char* before = chosen_set().name;
  const char* new_name = PyUnicode_AsUTF8AndSize(name, nullptr);
  if (new_name == nullptr) return nullptr;
  if (!choose(new_name)) {
    return PyErr_Format(PyExc_ValueError, "this processor has no instruction set %s", new_name);
  }
  return PyUnicode_FromString(before);
}

PyMethodDef methods[] = {{"step", (PyCFunction)(void (*)(void))caught<step>, METH_FASTCALL, nullptr},
                         {"Steps", (PyCFunction)(void (*)(void))caught<prepare>, METH_FASTCALL, nullptr},
                         {"change", caught<change>, METH_VARARGS, nullptr},
                         {"sum_of_squares", caught<sum_of_squares>, METH_O, nullptr},
                         {"use", caught<use>, METH_O, nullptr},
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
  changed_name = PyUnicode_InternFromString("changed");
  if (!data_name || !grad_name || !placement_name || !changed_name) return nullptr;
  return PyModule_Create(&definition);
}
