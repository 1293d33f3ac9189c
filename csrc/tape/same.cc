// Which values are the same: numbers bit for bit, so that 0.0 is not -0.0 and a nan is itself.

#include <cstring>
#include <initializer_list>

#include "guards.h"

namespace {

// numpy.<name>, imported once; null with an exception.
PyObject* numpy_type(const char* name, PyObject** known) {
  if (*known == nullptr) {
    PyObject* numpy = PyImport_ImportModule("numpy");
    if (numpy == nullptr) return nullptr;
    *known = PyObject_GetAttrString(numpy, name);
    Py_DECREF(numpy);
  }
  return *known;
}

int same_attribute(PyObject* before, PyObject* after, const char* name) {
  PyObject* first = PyObject_GetAttrString(before, name);
  PyObject* second = first == nullptr ? nullptr : PyObject_GetAttrString(after, name);
  const int answer = second == nullptr ? -1 : guards_same(first, second);
  Py_XDECREF(first);
  Py_XDECREF(second);
  return answer;
}

int same_attributes(PyObject* before, PyObject* after) {
  for (const char* name : {"start", "stop", "step"}) {
    const int answer = same_attribute(before, after, name);
    if (answer != 1) return answer;
  }
  return 1;
}

int same_tuples(PyObject* before, PyObject* after) {
  const Py_ssize_t count = PyTuple_Size(before);
  if (PyTuple_Size(after) != count) return 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const int answer = guards_same(PyTuple_GetItem(before, i), PyTuple_GetItem(after, i));
    if (answer != 1) return answer;
  }
  return 1;
}

// NumPy's scalars of one type: their units may differ, and then their bytes.
int same_scalars(PyObject* before, PyObject* after) {
  const int answer = same_attribute(before, after, "dtype");
  if (answer != 1) return answer;
  PyObject* first = PyObject_CallMethod(before, "tobytes", nullptr);
  PyObject* second = first == nullptr ? nullptr : PyObject_CallMethod(after, "tobytes", nullptr);
  const int equal = second == nullptr ? -1 : PyObject_RichCompareBool(first, second, Py_EQ);
  Py_XDECREF(first);
  Py_XDECREF(second);
  return equal;
}

// As isinstance, but it asks nobody for __class__.
bool is_a(PyObject* object, PyObject* type) {
  return PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(type)) != 0;
}

int same_of_numpy(PyObject* before, PyObject* after) {
  static PyObject *dtype, *generic, *mutable_scalar;
  if (numpy_type("dtype", &dtype) == nullptr || numpy_type("generic", &generic) == nullptr ||
      numpy_type("void", &mutable_scalar) == nullptr) {
    return -1;
  }
  if (is_a(before, dtype)) return PyObject_RichCompareBool(before, after, Py_EQ);
  return is_a(before, generic) && !is_a(before, mutable_scalar) ? same_scalars(before, after) : 0;
}

bool same_bits(double before, double after) { return std::memcmp(&before, &after, sizeof before) == 0; }

}  // namespace

int guards_same(PyObject* before, PyObject* after) {
  if (before == after) return 1;
  PyTypeObject* type = Py_TYPE(before);
  if (type != Py_TYPE(after)) return 0;
  if (type == &PyFloat_Type) return same_bits(PyFloat_AsDouble(before), PyFloat_AsDouble(after));
  if (type == &PyLong_Type || type == &PyUnicode_Type || type == &PyBytes_Type) {
    return PyObject_RichCompareBool(before, after, Py_EQ);
  }
  if (type == &PyTuple_Type) return same_tuples(before, after);
  if (type == &PyComplex_Type) {
    return same_bits(PyComplex_RealAsDouble(before), PyComplex_RealAsDouble(after)) &&
           same_bits(PyComplex_ImagAsDouble(before), PyComplex_ImagAsDouble(after));
  }
  if (type == &PySlice_Type || type == &PyRange_Type) return same_attributes(before, after);
  // Anything else of Python's own, or of a user, is itself alone: __eq__ may do whatever it likes.
  return same_of_numpy(before, after);
}
