/* A call of a verb with plain arrays in the form that a native library takes: NumPy arrays, or memory as
   (address, dtype code, shape, owner). Memory must be contiguous, and writable while the owner lives. */
#pragma once

#include <stdint.h>

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL flashlight_fast
#ifndef FAST_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include "../common/codes.cdef.h"
#include "../common/types.cdef.h"

enum { SHAPE = sizeof((fl_signature *)0)->shape / sizeof(int64_t) };

typedef struct {
  fl_signature signature;
  void *data, *output; /* arguments of fl_..._run */
  fl_room room;        /* for all_gather and gather: `output` then points here */
  fl_match match;      /* for a receive from any rank or of fewer rows: `output` then points here */
  int64_t rows;        /* rows of `out` in an uneven all_to_all */
  int peer;            /* peer of a message (-1: any rank); -1 for other calls */
  PyObject *result;    /* return value on success; an owned reference, or NULL */
} plain_call;

/* Read (verb, x, out, op, scale, root or peer, tag) for rank `rank` of `size`. Return 1, or -1 with an
   exception. Return 0 if the call is not plain: Python then handles it, or raises its error. */
int plain_read(PyObject *const *args, int rank, int size, plain_call *call);
/* Initialise a call of `verb` without arguments. */
void plain_begin(plain_call *call, int verb);

/* Read one end of a message: `array`, with FL_SEND or FL_RECV as `verb`. `partial` (True, False or None):
   fewer rows may arrive. Return 1 or 0. */
int plain_message(int verb, PyObject *array, PyObject *peer, PyObject *tag, PyObject *partial, int rank,
                  int size, plain_call *call);
/* Return the result of a receive with a match: `array`, or its received rows. A new reference. */
PyObject *plain_matched(PyObject *array, const fl_match *match);

/* Read the arguments of an uneven all_to_all; return 1 or 0. */
int plain_uneven(PyObject *x, PyObject *out, plain_call *call);
/* Return a new array like the call's `x` with `rows` rows; NULL with an exception. */
PyObject *plain_rows(PyObject *x, const plain_call *call, int64_t rows);

/* Return a new array with received data of the shape in `described`. NULL with an exception; NULL without an
   exception if Python must handle the call. */
PyObject *plain_received(const fl_signature *described, const void *data);

/* Return 1 if `x` is a number instead of an array: a float, a small int, or a NumPy scalar. */
int plain_has_number(PyObject *const *args);
/* plain_of_number: return an array with the number `x`. plain_number_of: return the element of `array` as a
   number of the type of `like`. NULL: an exception. */
PyObject *plain_of_number(PyObject *x);
PyObject *plain_number_of(PyArrayObject *array, PyObject *like);

/* Convert an int from 0 to `limit`; return 0 for other values and types. */
int plain_int(PyObject *given, int limit, int32_t *out);

/* Return 1 if this rank may finish the call before other ranks have made it: see csrc/shm/entering.cc. */
int plain_needs_nobody(const plain_call *call, int rank);

int plain_overlap(const plain_call *first, const plain_call *second);

/* The memory of an array, and whether the call writes to it. */
typedef struct {
  const char *begin, *end;
  int is_written;
} plain_span;

/* Return 1 if a span that the call writes overlaps another span, which is an error. Sorts `spans`. */
int plain_mixed_up(plain_span *spans, int count);

/* verbs(bytes): set the flags of the verbs, by code from 0. */
PyObject *plain_verbs(PyObject *module, PyObject *flags);

int plain_names(void);
