/* What the files of the module _tree share: the headers, and its functions. */

#ifndef FL_TREE_H
#define FL_TREE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL fl_tree_numpy
#ifndef FL_TREE_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Arrays begin at multiples of it in a buffer, so that any element type can be used in place. */
enum { ALIGNMENT = 16 };

static inline npy_intp aligned(npy_intp bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

PyObject *walk(PyObject *module, PyObject *args);
PyObject *pack(PyObject *module, PyObject *args);
PyObject *unpack(PyObject *module, PyObject *args);

#endif
