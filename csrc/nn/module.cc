// The module: kernels by their names, and calls of them on NumPy arrays.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#include <numpy/arrayobject.h>

#include <cstring>
#include <initializer_list>
#include <new>

#include "nn.h"

namespace fl::nn {

Blas blas;

namespace {

constexpr Py_ssize_t MOST_ARRAYS = 16, MOST_SIZES = 32, MOST_NUMBERS = 8;

/* find(name): the kernel's address, or None where it needs BLAS and there is none. */
PyObject* find(PyObject*, PyObject* name) {
  const char* wanted = PyUnicode_AsUTF8AndSize(name, nullptr);
  if (wanted == nullptr) return nullptr;
  for (const Row* rows : {convolutions, pools, norms, attentions, elements}) {
    for (const Row* row = rows; row->name != nullptr; ++row) {
      if (std::strcmp(row->name, wanted) != 0) continue;
      if (row->needs_blas && blas.gemm[0] == nullptr) Py_RETURN_NONE;
      return PyLong_FromVoidPtr(reinterpret_cast<void*>(row->kernel));
    }
  }
  return PyErr_Format(PyExc_LookupError, "no kernel %s", wanted);
}

// Read up to `most` items of a tuple; false with an exception.
template <typename T, typename Convert>
bool read(PyObject* tuple, Py_ssize_t most, T* to, Convert convert) {
  const Py_ssize_t count = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1;
  if (count < 0 || count > most) {
    PyErr_Format(PyExc_TypeError, "expected a tuple of at most %zd, got %R", most, tuple);
    return false;
  }
  for (Py_ssize_t i = 0; i < count; ++i) to[i] = convert(PyTuple_GetItem(tuple, i));
  return PyErr_Occurred() == nullptr;
}

// An array's memory; None: null.
char* memory_of(PyObject* object) {
  if (object == Py_None) return nullptr;
  PyArrayObject* array = reinterpret_cast<PyArrayObject*>(object);
  if (PyArray_Check(object) && PyArray_ISCARRAY_RO(array)) return PyArray_BYTES(array);
  PyErr_Format(PyExc_TypeError, "a kernel needs C-contiguous, aligned arrays, got %R", Py_TYPE(object));
  return nullptr;
}

/* call(address, arrays, sizes, numbers): the results are written, the first of `arrays`. */
PyObject* call(PyObject*, PyObject* args) {
  PyObject *address, *arrays, *sizes, *numbers;
  char* memory[MOST_ARRAYS];
  int64_t size[MOST_SIZES];
  double number[MOST_NUMBERS];
  if (!PyArg_ParseTuple(args, "OOOO", &address, &arrays, &sizes, &numbers) ||
      !read(arrays, MOST_ARRAYS, memory, memory_of) || !read(sizes, MOST_SIZES, size, PyLong_AsLongLong) ||
      !read(numbers, MOST_NUMBERS, number, PyFloat_AsDouble)) {
    return nullptr;
  }
  const auto kernel = reinterpret_cast<Kernel*>(PyLong_AsVoidPtr(address));
  if (kernel == nullptr) return nullptr;
  bool has_room = true;
  Py_BEGIN_ALLOW_THREADS;
  try {
    kernel(memory, size, number);
  } catch (const std::bad_alloc&) {
    has_room = false;
  }
  Py_END_ALLOW_THREADS;
  if (!has_room) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

/* use_blas(is_long, sgemm, dgemm): addresses. */
PyObject* use_blas(PyObject*, PyObject* args) {
  int is_long;
  Py_ssize_t at[2];
  if (!PyArg_ParseTuple(args, "pnn", &is_long, &at[0], &at[1])) return nullptr;
  for (int i = 0; i < 2; ++i) blas.gemm[i] = reinterpret_cast<void*>(at[i]);
  blas.is_long = is_long != 0;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"find", find, METH_O, nullptr},
                         {"call", call, METH_VARARGS, nullptr},
                         {"use_blas", use_blas, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_nn",   nullptr, -1,     methods,
                          nullptr,               nullptr, nullptr, nullptr};

}  // namespace
}  // namespace fl::nn

PyMODINIT_FUNC PyInit__nn(void) {
  import_array();
  return PyModule_Create(&fl::nn::definition);
}
