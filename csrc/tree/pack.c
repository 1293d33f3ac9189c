/* Arrays to and from one buffer of bytes, one after the other in native byte order. */

#include "tree.h"

/* From here on a copy is long enough to let other threads run meanwhile. */
enum { COPY_WITHOUT_GIL = 1 << 16 };

static void copy(char *to, const char *from, npy_intp bytes) {
  if (bytes < COPY_WITHOUT_GIL) {
    memcpy(to, from, (size_t)bytes);
    return;
  }
  Py_BEGIN_ALLOW_THREADS;
  memcpy(to, from, (size_t)bytes);
  Py_END_ALLOW_THREADS;
}

/* The place of `array` in the buffer, as an array. */
static PyArrayObject *place_at(char *home, PyArrayObject *array) {
  PyArray_Descr *native = PyArray_DescrNewByteorder(PyArray_DESCR(array), NPY_NATIVE);
  if (native == NULL) return NULL;
  return (PyArrayObject *)PyArray_NewFromDescr(&PyArray_Type, native, PyArray_NDIM(array),
                                               PyArray_DIMS(array), NULL, home, NPY_ARRAY_CARRAY,
                                               NULL);
}

static int move(PyArrayObject *array, char *home, int is_packing) {
  if (PyArray_ISCARRAY(array)) {
    char *data = PyArray_DATA(array);
    copy(is_packing ? home : data, is_packing ? data : home, PyArray_NBYTES(array));
    return 0;
  }
  PyArrayObject *place = place_at(home, array);
  if (place == NULL) return -1;
  const int failed = is_packing ? PyArray_CopyInto(place, array) : PyArray_CopyInto(array, place);
  Py_DECREF(place);
  return failed;
}

/* (arrays, buffer): exact arrays, and an array of bytes with room for them all. */
static PyObject *move_all(PyObject *args, int is_packing) {
  PyObject *arrays;
  PyArrayObject *buffer;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &arrays, &PyArray_Type, &buffer)) return NULL;
  char *home = PyArray_DATA(buffer);
  const char *end = home + PyArray_NBYTES(buffer);
  for (Py_ssize_t i = 0; i < PyList_Size(arrays); ++i) {
    PyArrayObject *array = (PyArrayObject *)PyList_GetItem(arrays, i);
    if (array == NULL) return NULL;
    if (PyArray_NBYTES(array) > end - home) {
      PyErr_SetString(PyExc_ValueError, "the buffer is too small for the arrays");
      return NULL;
    }
    if (move(array, home, is_packing) < 0) return NULL;
    home += aligned(PyArray_NBYTES(array));
  }
  Py_RETURN_NONE;
}

PyObject *pack(PyObject *module, PyObject *args) {
  (void)module;
  return move_all(args, 1);
}

PyObject *unpack(PyObject *module, PyObject *args) {
  (void)module;
  return move_all(args, 0);
}
