/* A group of one rank: nothing moves, so that a call is its record, a copy and a scale. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define NO_IMPORT_ARRAY
#define PY_ARRAY_UNIQUE_SYMBOL flashlight_fast
#include <numpy/arrayobject.h>
#include <string.h>

#include "binding.h"

enum { CODE_FLOAT32 = 11, CODE_FLOAT64 = 12 };
enum { LARGE_BYTES = 64 << 10 }; /* other threads go on meanwhile */

static int is_float(const fl_signature *s) { return s->dtype == CODE_FLOAT32 || s->dtype == CODE_FLOAT64; }

static int is_gather(const fl_signature *s) { return s->verb == FL_ALL_GATHER || s->verb == FL_GATHER; }

int can_run_alone(const plain_call *call, PyObject *out) {
  const fl_signature *s = &call->signature;
  if (is_message(s->verb)) return 0;
  if (is_gather(s) && out != Py_None && call->rows != s->shape[0]) return 0;
  return s->scale == 1.0 || (is_float(s) && !call->is_scattered);
}

static void scale(const fl_signature *s, void *data) {
  if (s->dtype == CODE_FLOAT32) {
    const float by = (float)s->scale;
    for (int64_t i = 0; i < s->count; ++i) ((float *)data)[i] *= by;
  } else {
    for (int64_t i = 0; i < s->count; ++i) ((double *)data)[i] *= s->scale;
  }
}

void run_alone(const plain_call *call) {
  const fl_signature *s = &call->signature;
  void *to = is_gather(s) ? call->room.data : call->output;
  const size_t bytes = (size_t)(s->count * s->itemsize);
  PyThreadState *others = bytes >= LARGE_BYTES ? PyEval_SaveThread() : NULL;
  if (to != NULL && bytes != 0) memmove(to, call->data, bytes); /* `out` may be what is given */
  if (s->scale != 1.0 && s->verb != FL_EXSCAN) scale(s, to == NULL ? call->data : to);
  if (others != NULL) PyEval_RestoreThread(others);
}
