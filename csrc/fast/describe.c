/* What a NumPy array is, written into a signature: from Python each field takes 100 ns or more. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define NO_IMPORT_ARRAY
#define PY_ARRAY_UNIQUE_SYMBOL flashlight_fast
#include <numpy/arrayobject.h>
#include "fast.h"

/* address(array): that of its elements. */
PyObject *address(PyObject *module, PyObject *array) {
  (void)module;
  if (PyArray_Check(array)) return PyLong_FromVoidPtr(PyArray_DATA((PyArrayObject *)array));
  PyErr_SetString(PyExc_TypeError, "expected an array");
  return NULL;
}

/* describe(address of a signature, array, verb, dtype, op, scale, root) */
PyObject *describe(PyObject *module, PyObject *const *args, Py_ssize_t count) {
  (void)module;
  if (count != 7 || !PyArray_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "expected (address, array, verb, dtype, op, scale, root)");
    return NULL;
  }
  fl_signature *signature = PyLong_AsVoidPtr(args[0]);
  if (signature == NULL) return NULL;
  describe_array((PyArrayObject *)args[1], signature);
  signature->verb = (int32_t)PyLong_AsLong(args[2]);
  signature->dtype = (int32_t)PyLong_AsLong(args[3]);
  signature->op = (int32_t)PyLong_AsLong(args[4]);
  signature->scale = PyFloat_AsDouble(args[5]);
  signature->root = (int32_t)PyLong_AsLong(args[6]);
  if (PyErr_Occurred()) return NULL;
  Py_RETURN_NONE;
}
