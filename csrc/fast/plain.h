/* A call of a verb with plain arrays, as a native library takes it: NumPy's, or memory of whatever library
   by its address: (address, code of the dtype, shape, owner) of what lies in one piece, and can be written
   to for as long as the owner lives. */
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
  void *data, *output; /* as fl_..._run takes them */
  fl_room room;        /* of the gathers */
  fl_match match;      /* of a receive from any rank, or of fewer rows: `output` is this then */
  int64_t rows;        /* for which there is room, of an all_to_all of unequal parts */
  int peer;            /* of a message, -1: any; else -1 */
  int is_scattered;    /* `data` lies not in one piece: of a group of one rank */
  double seconds;      /* that the call may take */
  PyObject *result;    /* what the call returns where all goes well; a reference of its own, or NULL */
} plain_call;

/* Read (verb, x, out, op, scale, root or peer, tag) of rank `rank` of `size`: 1, or 0 for what is not
   plain, of which Python says what is wrong with it if anything is; -1: an exception. */
int plain_read(PyObject *const *args, int rank, int size, plain_call *call);
/* A call of `verb` without arguments yet. */
void plain_begin(plain_call *call, int verb);

/* One end of a message: `array` of which `verb` is FL_SEND or FL_RECV, and whether fewer rows may come
   (False or None: no); 1 or 0. */
int plain_message(int verb, PyObject *array, PyObject *peer, PyObject *tag, PyObject *partial, int rank,
                  int size, plain_call *call);
/* What a receive with a match returns: `array`, or the rows of it that have come. A new reference. */
PyObject *plain_matched(PyObject *array, const fl_match *match);

/* What an all_to_all of unequal parts is given; 1 or 0. */
int plain_uneven(PyObject *x, PyObject *out, plain_call *call);
/* A new array like the call's `x` but for the first dimension; NULL with an exception. */
PyObject *plain_rows(PyObject *x, const plain_call *call, int64_t rows);

/* A new array of what a rank has received that did not know its shape: `described` describes it; NULL with an
   exception, or without one where Python must do it. */
PyObject *plain_received(const fl_signature *described, const void *data);

/* Whether a verb is given a number in place of an array: a float, a small int, or one of NumPy's. */
int plain_has_number(PyObject *const *args);
/* The array that travels for it, NULL with an exception; and the number like `like` that it has afterwards. */
PyObject *plain_of_number(PyObject *x);
PyObject *plain_number_of(PyArrayObject *array, PyObject *like);

/* A number from 0 to `limit`: 0 where it is another, or none. */
int plain_int(PyObject *given, int limit, int32_t *out);

/* Whether a rank may be done with the call without a look at the others': see csrc/shm/entering.cc. */
int plain_needs_nobody(const plain_call *call, int rank);

int plain_overlap(const plain_call *one, const plain_call *other);

/* The memory of an array, and whether it is written to. */
typedef struct {
  const char *begin, *end;
  int is_written;
} plain_span;

/* Whether one that is written to shares memory with another one, which is an error that Python words; sorts them. */
int plain_mixed_up(plain_span *spans, int count);

/* plain_verbs(bytes): the flags of each code, from 0 on. */
PyObject *plain_verbs(PyObject *module, PyObject *flags);

int plain_names(void);
