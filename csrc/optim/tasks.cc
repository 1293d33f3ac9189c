#include "tasks.h"

#include <cstring>

namespace fl::optim {

bool read_rule(PyObject* given, Numbered* to) {
  PyObject* numbers = PyTuple_Check(given) ? PyTuple_GetItem(given, 1) : nullptr;
  const char* name = numbers ? PyUnicode_AsUTF8AndSize(PyTuple_GetItem(given, 0), nullptr) : nullptr;
  if (name == nullptr || !PyTuple_Check(numbers)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a rule is (name, (number, ...))");
    return false;
  }
  const Rule* rules = chosen_set().rules;
  to->rule = nullptr;
  for (int i = 0; i < RULES && to->rule == nullptr; ++i) {
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

bool take_grad(Owned grad, Task* task, bool may_copy) {
  PyArrayObject* param = param_of(*task);
  if (may_copy && grad != nullptr && PyArray_CheckExact(grad.get())) {
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

void run(const Task& task, const Numbered& rule, double scale) {
  const Step step = task.is_double ? rule.rule->float64 : rule.rule->float32;
  Piece piece = task.piece;
  void* grad = task.grad;
  if (piece.grads == nullptr) piece.grads = &grad;
  step(piece, rule.numbers, scale);
}

namespace {

// Count a step of parameter `position`; return which it is, or -1 with an error.
long long count_step(PyObject* times, Py_ssize_t position) {
  PyObject* before = PyList_GetItem(times, position);
  const long long time = before == nullptr ? -1 : PyLong_AsLongLong(before) + 1;
  if (time == 0 || before == nullptr) return -1;
  PyObject* now = PyLong_FromLongLong(time);
  return now == nullptr || PyList_SetItem(times, position, now) < 0 ? -1 : time;
}

bool ask(const Asking& asking, Py_ssize_t position, Numbered* numbered) {
  Owned number(PyLong_FromSsize_t(position));
  if (number == nullptr) return false;
  Owned answer(PyObject_CallFunctionObjArgs(asking.rule, number.get(), asking.scale, nullptr));
  if (answer == nullptr || !read_rule(answer.get(), numbered)) return false;
  if (numbered->rule->states != asking.states) {
    PyErr_Format(PyExc_ValueError, "the rule %s has %d states, not %zd", numbered->rule->name,
                 numbered->rule->states, asking.states);
    return false;
  }
  return true;
}

}  // namespace

bool run_all(const Task* tasks, size_t count, const Asking& asking, double scale) {
  Numbered numbered;
  long long known = -1;
  for (const Task* task = tasks; task != tasks + count; ++task) {
    const long long time = count_step(asking.times, task->position);
    if (time < 0) return false;
    if (time != known || asking.per_position) {
      if (!ask(asking, task->position, &numbered)) return false;
      known = time;
    }
    if (task->piece.size * sizeof(float) < BYTES_WITHOUT_GIL) {
      run(*task, numbered, scale);
    } else {
      Py_BEGIN_ALLOW_THREADS;
      run(*task, numbered, scale);
      Py_END_ALLOW_THREADS;
    }
  }
  return true;
}

}  // namespace fl::optim
