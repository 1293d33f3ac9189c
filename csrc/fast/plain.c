/* Plain calls: contiguous, exact NumPy arrays or memory by address, and arguments without conversion. */

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "plain.h"

/* Codes of csrc/reduce/reduce.h. */
enum { OPS = FL_XOR + 1 };

/* Bits of the operations that reductions of each kind of dtype allow. arrays.py has the same rules. */
enum {
  BITS = 1 << FL_AND | 1 << FL_OR | 1 << FL_XOR,
  EXTREMES = 1 << FL_MIN | 1 << FL_MAX,
  OF_BOOL = EXTREMES | BITS,
  OF_INTEGERS = 1 << FL_SUM | 1 << FL_PROD | EXTREMES | BITS,
  OF_FLOATS = 1 << FL_SUM | 1 << FL_PROD | 1 << FL_AVG | EXTREMES,
  OF_COMPLEX = 1 << FL_SUM | 1 << FL_PROD | 1 << FL_AVG,
};

/* NumPy's type number of each dtype code. NumPy has no bfloat16; a uint16 array has the same size. */
static const int types[FL_MOVED] = {
    NPY_BOOL,   NPY_INT8,       NPY_INT16,  NPY_INT32,   NPY_INT64,  NPY_UINT8,
    NPY_UINT16, NPY_UINT32,     NPY_UINT64, NPY_HALF,    NPY_UINT16, NPY_FLOAT,
    NPY_DOUBLE, NPY_LONGDOUBLE, NPY_CFLOAT, NPY_CDOUBLE, NPY_CLONGDOUBLE,
};

static signed char codes[NPY_HALF + 1]; /* by NumPy's number: code of csrc/reduce/reduce.h, or -1 */
static PyObject *names[OPS];
static unsigned char verbs[FL_VERBS];

PyObject *plain_verbs(PyObject *module, PyObject *flags) {
  (void)module;
  char *data;
  Py_ssize_t count;
  if (PyBytes_AsStringAndSize(flags, &data, &count) < 0) return NULL;
  memcpy(verbs, data, count < FL_VERBS ? (size_t)count : FL_VERBS);
  Py_RETURN_NONE;
}

void plain_begin(plain_call *call, int verb) {
  memset(call, 0, sizeof *call);
  call->signature.verb = verb;
  call->signature.scale = 1.0;
  call->peer = -1;
}

int plain_needs_nobody(const plain_call *call, int rank) {
  enum { INLINE_BYTES = 16384 };
  const fl_signature *s = &call->signature;
  if (s->count * s->itemsize > INLINE_BYTES) return 0;
  switch (s->verb) {
    case FL_BROADCAST:
    case FL_SCATTER: return rank == s->root;
    case FL_REDUCE:
    case FL_GATHER: return rank != s->root;
    case FL_SCAN:
    case FL_EXSCAN: return rank == 0;
    default: return 0;
  }
}

int plain_names(void) {
  memset(codes, -1, sizeof codes);
  for (int code = 0; code < FL_MOVED; ++code) {
    if (code != FL_BFLOAT16) codes[types[code]] = (signed char)code;
  }
  codes[NPY_INT] = codes[NPY_INT32]; /* C has several types of one size */
  codes[NPY_UINT] = codes[NPY_UINT32];
  codes[NPY_LONGLONG] = codes[NPY_INT64];
  codes[NPY_ULONGLONG] = codes[NPY_UINT64];
  static const char *const text[OPS] = {"sum", "prod", "min", "max", "avg", "and", "or", "xor"};
  for (int op = 0; op < OPS; ++op) {
    names[op] = PyUnicode_InternFromString(text[op]);
    if (names[op] == NULL) return 0;
  }
  return 1;
}

/* Return 1 if the user-defined dtype `descr` is bfloat16 of ml_dtypes (its number varies). */
static int is_bfloat16(const PyArray_Descr *descr) {
  static int number = NPY_NOTYPE;
  if (number == NPY_NOTYPE) {
    PyObject *name = PyObject_GetAttrString((PyObject *)descr->typeobj, "__name__");
    if (name != NULL && PyUnicode_CompareWithASCIIString(name, "bfloat16") == 0) number = descr->type_num;
    if (name == NULL) PyErr_Clear();
    Py_XDECREF(name);
  }
  return number == descr->type_num;
}

/* Return the code of a dtype; -1: Python must handle the call. */
static int dtype_code(const PyArray_Descr *descr) {
  if (descr->type_num < (int)sizeof codes) return codes[descr->type_num];
  return PyTypeNum_ISUSERDEF(descr->type_num) && is_bfloat16(descr) ? FL_BFLOAT16 : -1;
}

int plain_int(PyObject *value, int limit, int32_t *out) {
  if (!PyLong_CheckExact(value)) return 0;
  int overflow = 0;
  const long number = PyLong_AsLongAndOverflow(value, &overflow);
  if (overflow != 0 || number < 0 || number > limit) return 0;
  *out = (int32_t)number;
  return 1;
}

/* Return the memory at an address. An address in the first page is a mistake, unless there are no elements. */
static void *read_address(PyObject *value, fl_signature *out) {
  static const int32_t sizes[FL_MOVED] = {
      1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, sizeof(long double), 8, 16, 2 * sizeof(long double)};
  static char nothing;
  enum { PAGE = 4096 };
  if (!PyTuple_CheckExact(value) || PyTuple_Size(value) != 4) return NULL;
  PyObject *place = PyTuple_GetItem(value, 0), *shape = PyTuple_GetItem(value, 2);
  if (!PyLong_CheckExact(place) || !plain_int(PyTuple_GetItem(value, 1), FL_MOVED - 1, &out->dtype) ||
      !PyTuple_Check(shape) || PyTuple_Size(shape) > SHAPE) {
    return NULL;
  }
  out->itemsize = sizes[out->dtype];
  out->ndim = (int32_t)PyTuple_Size(shape);
  int64_t bytes = out->itemsize;
  for (int d = 0; d < out->ndim; ++d) {
    PyObject *extent = PyTuple_GetItem(shape, d);
    int overflow = 1;
    if (PyLong_CheckExact(extent)) out->shape[d] = PyLong_AsLongLongAndOverflow(extent, &overflow);
    if (overflow != 0 || out->shape[d] < 0) return NULL;
    if (__builtin_mul_overflow(bytes, out->shape[d], &bytes)) return NULL;
  }
  out->count = bytes / out->itemsize;
  const size_t address = PyLong_AsSize_t(place);
  if (address == SIZE_MAX) PyErr_Clear();
  if (bytes == 0) return &nothing;
  return address < PAGE || address == SIZE_MAX ? NULL : (void *)address;
}

static void *describe(PyArrayObject *array, fl_signature *out) {
  out->dtype = dtype_code(PyArray_DESCR(array));
  out->ndim = PyArray_NDIM(array);
  if (out->dtype < 0 || out->ndim > SHAPE) return NULL;
  out->itemsize = (int32_t)PyArray_ITEMSIZE(array);
  out->count = 1;
  for (int d = 0; d < out->ndim; ++d) out->count *= out->shape[d] = PyArray_DIM(array, d);
  return PyArray_DATA(array);
}

/* Describe an array, or memory given by its address, in `out` and return its data; NULL: left to Python. */
static void *read_memory(PyObject *x, int writes, fl_signature *out) {
  if (!PyArray_CheckExact(x)) return read_address(x, out);
  PyArrayObject *array = (PyArrayObject *)x;
  if (!(writes ? PyArray_ISCARRAY(array) : PyArray_ISCARRAY_RO(array))) return NULL;
  return describe(array, out);
}

/* Return the operation's code, or -1. Names are literals in programs, so they are compared by identity. */
static int read_op(PyObject *value) {
  for (int op = 0; op < OPS; ++op) {
    if (value == names[op]) return op;
  }
  if (!PyLong_Check(value)) return -1;
  int overflow = 0;
  const long op = PyLong_AsLongAndOverflow(value, &overflow);
  return overflow == 0 && op >= 0 && op < OPS ? (int)op : -1;
}

static int read_scale(PyObject *value, double *out) {
  if (PyFloat_CheckExact(value)) {
    *out = PyFloat_AsDouble(value);
    return *out - *out == 0; /* finite */
  }
  int32_t small;
  if (!plain_int(value, INT_MAX, &small)) return 0;
  *out = small;
  return 1;
}

/* Read operation and scale; return 0 if Python must handle them. An average becomes a sum with another scale,
   except in scans, where the divisor depends on the rank. */
static int read_reduction(PyObject *given_op, PyObject *given_scale, int size, fl_signature *out) {
  const int code = out->dtype, op = read_op(given_op);
  if (op < 0 || !read_scale(given_scale, &out->scale)) return 0;
  const int is_whole = code < FL_FLOAT16;
  const int of_floats = code < FL_COMPLEX64 ? OF_FLOATS : OF_COMPLEX;
  const int allowed = code == FL_BOOL ? OF_BOOL : is_whole ? OF_INTEGERS : of_floats;
  if ((allowed >> op & 1) == 0 || (is_whole && out->scale != 1.0)) return 0;
  out->op = op;
  if (op == FL_AVG && (verbs[out->verb] & FL_VERB_PREFIX) == 0) {
    out->op = FL_SUM;
    out->scale /= size;
  }
  return 1;
}

/* Return a new array of `shape`, with the dtype of `like` if that is an array. */
static PyObject *new_array(PyObject *like, const fl_signature *shape) {
  npy_intp dims[SHAPE];
  for (int d = 0; d < shape->ndim; ++d) dims[d] = (npy_intp)shape->shape[d];
  const int is_array = like != NULL && PyArray_CheckExact(like);
  PyArray_Descr *descr = is_array ? (PyArray_Descr *)Py_NewRef(PyArray_DESCR((PyArrayObject *)like))
                                  : PyArray_DescrFromType(types[shape->dtype]);
  return PyArray_NewFromDescr(&PyArray_Type, descr, shape->ndim, dims, NULL, NULL, 0, NULL);
}

PyObject *plain_received(const fl_signature *described, const void *data) {
  const int code = described->dtype;
  if (code >= FL_MOVED || code == FL_BFLOAT16 || described->ndim < 0 || described->ndim > SHAPE) {
    return NULL;
  }
  PyObject *array = new_array(NULL, described);
  if (array != NULL) {
    memcpy(PyArray_DATA((PyArrayObject *)array), data, (size_t)(described->count * described->itemsize));
  }
  return array;
}

static int overlap(const void *first, int64_t bytes, const void *second, int64_t second_bytes) {
  const char *a = first, *b = second;
  return a < b + second_bytes && b < a + bytes;
}

int plain_overlap(const plain_call *first, const plain_call *second) {
  const fl_signature *a = &first->signature, *b = &second->signature;
  return overlap(first->data, a->count * a->itemsize, second->data, b->count * b->itemsize);
}

static int by_address(const void *first, const void *second) {
  const char *a = ((const plain_span *)first)->begin, *b = ((const plain_span *)second)->begin;
  return (a > b) - (a < b);
}

int plain_mixed_up(plain_span *spans, int count) {
  int is_in_order = 1;
  for (int i = 1; i < count; ++i) is_in_order &= spans[i - 1].begin <= spans[i].begin;
  if (!is_in_order) qsort(spans, (size_t)count, sizeof *spans, by_address);
  const char *end = NULL, *end_written = NULL;
  for (const plain_span *span = spans; span < spans + count; ++span) {
    if (span->begin == span->end) continue;
    if (span->begin < end_written || (span->is_written && span->begin < end)) return 1;
    if (end == NULL || span->end > end) end = span->end;
    if (span->is_written && (end_written == NULL || span->end > end_written)) end_written = span->end;
  }
  return 0;
}

PyObject *plain_rows(PyObject *x, const plain_call *call, int64_t rows) {
  fl_signature all = call->signature;
  all.shape[0] = rows;
  return new_array(x, &all);
}

/* Read `out`, which must have the dtype of the input and, from dimension `first` on, the shape of `expected`.
   It must not overlap the input, except that the input may be its row `own_row` (-1: no exception). */
static int read_output(PyObject *out, const fl_signature *expected, int first, int own_row, plain_call *call) {
  const fl_signature *s = &call->signature;
  fl_signature room;
  call->output = read_memory(out, 1, &room);
  if (call->output == NULL || room.dtype != s->dtype || room.ndim != expected->ndim) return 0;
  for (int d = first; d < room.ndim; ++d) {
    if (room.shape[d] != expected->shape[d]) return 0;
  }
  call->rows = room.shape[0];
  call->room = (fl_room){call->output, (size_t)(room.count * room.itemsize)};
  const int64_t input_bytes = s->count * s->itemsize;
  if (own_row >= 0 && room.count == expected->count && call->data == (char *)call->output + own_row * input_bytes) return 1;
  return !overlap(call->data, input_bytes, call->output, room.count * room.itemsize);
}

int plain_uneven(PyObject *x, PyObject *out, plain_call *call) {
  fl_signature *s = &call->signature;
  plain_begin(call, FL_ALL_TO_ALL);
  call->data = read_memory(x, 0, s);
  if (call->data == NULL || s->ndim == 0) return 0;
  return out == Py_None ? PyArray_CheckExact(x) : read_output(out, s, 1, -1, call);
}

/* Set the result: `out`, which must be like `expected`, or a new array if `x` is an array. For a gather, the
   library checks the first dimension of `out`. In an all_gather of memory of one row, `x` may be this rank's
   row of `out`, because every rank sends one row. */
static int make_result(PyObject *x, PyObject *out, const fl_signature *expected, int rank, plain_call *call) {
  const fl_signature *s = &call->signature;
  const int gathers = s->verb == FL_ALL_GATHER || s->verb == FL_GATHER;
  if (out != Py_None) {
    const int is_row = s->verb == FL_ALL_GATHER && s->ndim == 2 && s->shape[0] == 1 && PyTuple_Check(x);
    if (!read_output(out, expected, gathers, is_row ? rank : -1, call)) return 0;
    call->result = Py_NewRef(out);
  } else {
    if (!PyArray_CheckExact(x)) return 0;
    call->result = new_array(x, expected);
    if (call->result == NULL) return -1;
    call->output = PyArray_DATA((PyArrayObject *)call->result);
    call->room = (fl_room){call->output, (size_t)(expected->count * expected->itemsize)};
  }
  /* If a gather's result has no bytes, pass no room. The rows are then counted at the end. */
  if (gathers) call->output = call->room.bytes != 0 ? &call->room : NULL;
  return 1;
}

/* Read the arguments of a verb that returns a new array. */
static int read_apart(PyObject *x, PyObject *out, int rank, int size, plain_call *call) {
  fl_signature *s = &call->signature;
  const int is_root = rank == s->root;
  if (s->verb == FL_SCATTER && !is_root) {
    if (out == Py_None) {
      if (x != Py_None && !PyArray_CheckExact(x)) return 0; /* `x` may determine the result's type */
      s->ndim = FL_ANY;
      return !PyTuple_Check(x);
    }
    call->output = read_memory(out, 1, s);
    if (call->output == NULL) return 0;
    call->result = Py_NewRef(out);
    return 1;
  }
  call->data = read_memory(x, 0, s);
  if (call->data == NULL) return 0;
  const int gathers = s->verb == FL_ALL_GATHER || s->verb == FL_GATHER;
  if (gathers && s->ndim == 0) { /* one row */
    s->ndim = 1;
    s->shape[0] = 1;
  }
  fl_signature expected = *s;
  if (gathers) {
    if (s->verb == FL_GATHER && !is_root) {
      call->result = Py_NewRef(Py_None);
      return 1;
    }
    expected.shape[0] *= size;
    expected.count *= size;
  } else {
    if (s->ndim == 0 || s->shape[0] % size != 0) return 0;
    if (s->verb != FL_ALL_TO_ALL) {
      expected.shape[0] /= size;
      expected.count /= size;
    }
  }
  const int status = make_result(x, out, &expected, rank, call);
  if (s->verb == FL_SCATTER) *s = expected;
  return status;
}

/* Return 1 if a reduction of the int cannot overflow 64 bits. Python handles larger ints, and products. */
static int is_small(PyObject *x, PyObject *op) {
  int overflow = 0;
  const long number = PyLong_CheckExact(x) ? PyLong_AsLongAndOverflow(x, &overflow) : LONG_MAX;
  return overflow == 0 && number >= -INT_MAX && number <= INT_MAX && op != names[FL_PROD] && !PyLong_Check(op);
}

int plain_has_number(PyObject *const *args) {
  PyObject *x = args[1];
  int32_t verb;
  if (PyArray_CheckExact(x) || !plain_int(args[0], FL_VERBS - 1, &verb)) return 0;
  if ((verbs[verb] & FL_VERB_IN_PLACE) == 0 || verb == FL_RECV) return 0;
  return PyFloat_CheckExact(x) || PyArray_IsScalar(x, Number) || is_small(x, args[3]);
}

PyObject *plain_of_number(PyObject *x) {
  if (PyArray_IsScalar(x, Number)) return PyArray_FromScalar(x, NULL);
  const int is_float = PyFloat_CheckExact(x), type = is_float ? NPY_DOUBLE : NPY_INT64;
  PyObject *array = PyArray_New(&PyArray_Type, 0, NULL, type, NULL, NULL, 0, 0, NULL);
  if (array == NULL) return NULL;
  void *data = PyArray_DATA((PyArrayObject *)array);
  if (is_float) {
    *(double *)data = PyFloat_AsDouble(x);
  } else {
    *(int64_t *)data = PyLong_AsLong(x);
  }
  return array;
}

PyObject *plain_number_of(PyArrayObject *array, PyObject *like) {
  void *data = PyArray_DATA(array);
  if (PyFloat_CheckExact(like)) return PyFloat_FromDouble(*(double *)data);
  if (PyLong_CheckExact(like)) return PyLong_FromLongLong(*(int64_t *)data);
  return PyArray_ToScalar(data, array);
}

int plain_message(int verb, PyObject *array, PyObject *peer, PyObject *tag, PyObject *partial, int rank,
                  int size, plain_call *call) {
  fl_signature *s = &call->signature;
  plain_begin(call, verb);
  int32_t other = -1;
  const int is_any = verb == FL_RECV && peer == Py_None && size > 1, is_partial = partial == Py_True;
  if (!is_any && (!plain_int(peer, size - 1, &other) || other == rank)) return 0;
  if (!plain_int(tag, INT_MAX, &s->root)) return 0;
  call->data = read_memory(array, verb == FL_RECV, s);
  call->peer = other;
  if (is_partial ? verb != FL_RECV || !PyArray_CheckExact(array) || s->ndim == 0
                 : partial != Py_False && partial != Py_None) {
    return 0;
  }
  if (is_any || is_partial) {
    call->match = (fl_match){.source = -1, .partial = is_partial, .patience = -1};
    call->output = &call->match;
  }
  return call->data != NULL;
}

PyObject *plain_matched(PyObject *array, const fl_match *match) {
  if (match->partial != 0) return PySequence_GetSlice(array, 0, (Py_ssize_t)match->rows);
  return Py_NewRef(array);
}

int plain_read(PyObject *const *args, int rank, int size, plain_call *call) {
  PyObject *x = args[1], *out = args[2];
  fl_signature *s = &call->signature;
  int32_t verb;
  if (!plain_int(args[0], FL_VERBS - 1, &verb) || (verbs[verb] & FL_VERB_KNOWN) == 0) return 0;
  const int flags = verbs[verb];
  if (verb == FL_SEND || verb == FL_RECV) {
    return plain_message(verb, x, args[5], args[6], args[3], rank, size, call);
  }
  if (verb == FL_ALL_TO_ALL && !PyUnicode_Check(args[3])) return 0; /* row counts */
  plain_begin(call, verb);
  const int most = verb == FL_ALL_REDUCE ? INT_MAX : size - 1; /* digest of packed arrays, or the root */
  if ((verb == FL_ALL_REDUCE || (flags & FL_VERB_ROOTED) != 0) && !plain_int(args[5], most, &s->root)) return 0;
  if (verb == FL_BARRIER) {
    x = Py_None;
  } else if ((flags & FL_VERB_IN_PLACE) != 0) {
    call->data = read_memory(x, 1, s);
    if (call->data == NULL) return 0;
  } else {
    const int read = read_apart(x, out, rank, size, call);
    if (read <= 0) return read;
  }
  if ((flags & FL_VERB_REDUCES) != 0 && !read_reduction(args[3], args[4], size, s)) {
    Py_CLEAR(call->result);
    return 0;
  }
  if (call->result == NULL && s->ndim != FL_ANY) call->result = Py_NewRef(x);
  return 1;
}
