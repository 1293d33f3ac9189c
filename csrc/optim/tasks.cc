#include "tasks.h"

#include <cmath>
#include <cstring>
#include <optional>

namespace fl::optim {
namespace {

// The step of a parameter releases the GIL if the parameter has at least this number of bytes.
constexpr size_t BYTES_WITHOUT_GIL = 1 << 16;

// A square is std::pow(x, TWO), which has the bits of Python's pow(). x * x differs for one of 1,200 numbers.
const volatile double TWO = 2;

bool read_field(PyObject* python_object, Field* to) {
  *to = {NUMBER, 0, 0};
  if (!PyTuple_Check(python_object)) {
    to->a = PyFloat_AsDouble(python_object);
    return !PyErr_Occurred();
  }
  const Py_ssize_t size = PyTuple_Size(python_object);
  const long form = size < 1 || size > 3 ? -1 : PyLong_AsLong(PyTuple_GetItem(python_object, 0));
  if (!PyErr_Occurred() && (form < 0 || form >= FORMS)) {
    PyErr_SetString(PyExc_ValueError, "a field is a number or (form, number, ...)");
  }
  if (PyErr_Occurred()) return false;
  to->form = static_cast<Form>(form);
  if (size > 1) to->a = PyFloat_AsDouble(PyTuple_GetItem(python_object, 1));
  if (size > 2) to->b = PyFloat_AsDouble(PyTuple_GetItem(python_object, 2));
  return !PyErr_Occurred();
}

// Return the data of an array of `size` elements (-1: any number), or null with an exception.
void* memory(PyObject* python_object, int type, npy_intp size) {
  PyArrayObject* array = reinterpret_cast<PyArrayObject*>(python_object);
  if (PyArray_CheckExact(python_object) && PyArray_ISCARRAY(array) && PyArray_TYPE(array) == type &&
      PyArray_NDIM(array) == 1 && (size < 0 || PyArray_SIZE(array) == size)) {
    return PyArray_DATA(array);
  }
  return PyErr_Format(PyExc_TypeError, "lr, counts and norms are arrays: float64 (1,), int64, float64");
}

// Compute the expression of a field for step `time`. Nothing if it divides by 0.
std::optional<double> evaluate(const Field& field, const Source& source, const Task& task, npy_int64 time) {
  if (field.form == NUMBER) return field.a;
  const double lr = *source.lr;
  if (field.form == LR) return lr;
  if (field.form == SHRINK) return 1 - lr * field.a;
  if (field.form == INVERSE) {
    double& norm = source.norms[task.position];
    const Squares sum = task.is_double ? chosen_set().float64 : chosen_set().float32;
    const double squares = sum(task.piece.grad, task.piece.size) * std::pow(source.scale, TWO);
    norm = field.a * norm + (1 - field.a) * squares;
    const double divisor = std::sqrt(norm) + field.b;
    return divisor != 0 ? 1 / divisor : 0;
  }
  const double rest = 1 - std::pow(field.a, static_cast<double>(time));
  if (field.form == ROOT) return rest > 0 ? std::optional(1 / std::sqrt(rest)) : std::nullopt;
  return rest != 0 ? std::optional(lr / rest) : std::nullopt;
}

PyArrayObject* param_of(const Task& task) { return reinterpret_cast<PyArrayObject*>(task.kept[0].get()); }

PyArrayObject* writable(PyObject* object, PyArrayObject* like) {
  PyArrayObject* array = readable(object, like);
  return array != nullptr && PyArray_ISWRITEABLE(array) ? array : nullptr;
}

bool overlap(PyArrayObject* one, PyArrayObject* other) {
  const char *a = PyArray_BYTES(one), *b = PyArray_BYTES(other);
  return a < b + PyArray_NBYTES(other) && b < a + PyArray_NBYTES(one);
}

}  // namespace

bool read_rule(PyObject* python_object, Fields* to) {
  PyObject* fields = PyTuple_Check(python_object) ? PyTuple_GetItem(python_object, 1) : nullptr;
  const char* name = fields ? PyUnicode_AsUTF8AndSize(PyTuple_GetItem(python_object, 0), nullptr) : nullptr;
  if (name == nullptr || !PyTuple_Check(fields)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a rule is (name, (field, ...))");
    return false;
  }
  const Rule* rule = chosen_set().rules;
  const Rule* const end = rule + RULES;
  while (rule != end && std::strcmp(rule->name, name) != 0) ++rule;
  if (rule == end || PyTuple_Size(fields) != rule->numbers) {
    PyErr_Format(PyExc_ValueError, "unknown rule %s with %zd numbers", name, PyTuple_Size(fields));
    return false;
  }
  to->rule = rule;
  for (int i = 0; i < rule->numbers; ++i) {
    if (!read_field(PyTuple_GetItem(fields, i), &to->field_list[i])) return false;
  }
  return true;
}

bool read_source(PyObject* const* python_object, Source* to) {
  to->lr = static_cast<const double*>(memory(python_object[0], NPY_DOUBLE, 1));
  to->counts = static_cast<npy_int64*>(memory(python_object[1], NPY_INT64, -1));
  if (to->lr == nullptr || to->counts == nullptr) return false;
  to->params = PyArray_SIZE(reinterpret_cast<PyArrayObject*>(python_object[1]));
  if (python_object[2] != Py_None) {
    to->norms = static_cast<double*>(memory(python_object[2], NPY_DOUBLE, to->params));
    if (to->norms == nullptr) return false;
  }
  to->scale = PyFloat_AsDouble(python_object[4]);
  if (PyErr_Occurred() || !read_rule(python_object[3], &to->fields)) return false;
  for (int i = 0; i < to->fields.rule->numbers; ++i) {
    if (to->fields.field_list[i].form == INVERSE && to->norms == nullptr) {
      PyErr_SetString(PyExc_TypeError, "the rule needs norms");
      return false;
    }
  }
  for (int i = 0; i < 3; ++i) to->kept[i].reset(Py_NewRef(python_object[i]));
  return true;
}

PyArrayObject* readable(PyObject* object, PyArrayObject* like) {
  if (object == nullptr || !PyArray_CheckExact(object)) return nullptr;
  PyArrayObject* array = reinterpret_cast<PyArrayObject*>(object);
  if (!PyArray_ISCARRAY_RO(array)) return nullptr;
  const int type = PyArray_TYPE(array);
  if (like == nullptr) return type == NPY_FLOAT || type == NPY_DOUBLE ? array : nullptr;
  return type == PyArray_TYPE(like) && PyArray_SAMESHAPE(array, like) ? array : nullptr;
}

bool take_param(Owned param, Task* task) {
  PyArrayObject* array = writable(param.get(), nullptr);
  if (array == nullptr) return false;
  task->piece.param = PyArray_DATA(array);
  task->piece.size = static_cast<size_t>(PyArray_SIZE(array));
  task->is_double = PyArray_TYPE(array) == NPY_DOUBLE;
  task->kept[0] = std::move(param);
  return true;
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
  task->piece.grad = PyArray_DATA(array);
  task->kept[1] = std::move(grad);
  return true;
}

bool take_state(int number, PyObject* state, Task* task) {
  PyArrayObject* array = writable(state, param_of(*task));
  if (array == nullptr) return false;
  task->kept[2 + number].reset(Py_NewRef(state));
  task->piece.states[number] = PyArray_DATA(array);
  return true;
}

bool take_arrays(PyObject* tuple, int states, Task* task) {
  const Py_ssize_t first = PyTuple_Size(tuple) - states;  // position of the first state
  bool fits = take_param(share(PyTuple_GetItem(tuple, first - 2)), task) &&
              take_grad(share(PyTuple_GetItem(tuple, first - 1)), task, false);
  for (int i = 0; fits && i < states; ++i) fits = take_state(i, PyTuple_GetItem(tuple, first + i), task);
  return fits;
}

void run(const Task& task, const Rule& rule, const double* numbers, double scale) {
  (task.is_double ? rule.float64 : rule.float32)(task.piece, numbers, scale);
}

bool run_all(const std::vector<Task>& tasks, const Source& source) {
  double numbers[MOST_NUMBERS];
  npy_int64 cached_count = 0;
  bool is_cached = false;
  for (const Task& task : tasks) {
    const bool is_long = task.piece.size * sizeof(float) >= BYTES_WITHOUT_GIL;
    PyThreadState* thread = is_long ? PyEval_SaveThread() : nullptr;
    npy_int64& count = source.counts[task.position];
    bool is_defined = true;
    if (!is_cached || count != cached_count || source.norms != nullptr) {
      for (int i = 0; i < source.fields.rule->numbers; ++i) {
        const std::optional<double> number = evaluate(source.fields.field_list[i], source, task, count + 1);
        is_defined = is_defined && number.has_value();
        numbers[i] = number.value_or(0);
      }
      is_cached = is_defined;
      cached_count = count;
    }
    if (is_defined) {
      run(task, *source.fields.rule, numbers, source.scale);
      ++count;
    }
    if (is_long) PyEval_RestoreThread(thread);
    if (!is_defined) {
      PyErr_SetString(PyExc_ZeroDivisionError, "an optimizer's step: the correction of a running mean divides by 0");
      return false;
    }
  }
  return true;
}

}  // namespace fl::optim
