// NumPy's C API, owned references, and a wrapper of functions that may run out of memory. In each extension, one
// file defines FL_MODULE first. This file contains NumPy's table of functions and must call import_array().
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION  // the default before NumPy 2.3 lacks PyDataMem_SetHandler
#define PY_ARRAY_UNIQUE_SYMBOL flashlight_numpy
#ifndef FL_MODULE
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include <memory>
#include <new>

namespace fl {

struct Release {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;

inline Owned share(PyObject* object) {
  Py_XINCREF(object);
  return Owned(object);
}

template <auto function>
struct Caught;
template <typename... Args, PyObject* (*function)(Args...)>
struct Caught<function> {
  static PyObject* call(Args... args) noexcept {
    try {
      return function(args...);
    } catch (const std::bad_alloc&) {
      return PyErr_NoMemory();
    }
  }
};

// Call `function` and convert std::bad_alloc to MemoryError. `function` must hold the GIL when it throws.
template <auto function>
constexpr auto caught = &Caught<function>::call;

}  // namespace fl
