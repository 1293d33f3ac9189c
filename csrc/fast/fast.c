/* all_reduce of an ordinary NumPy array without a detour through Python.

   In shared memory a small reduction takes some 200 ns; to look at an array from Python, to
   describe it and to call a library takes 5 us. This module reads the array itself (NumPy's C
   API) and calls the two steps of csrc/shm. Whatever is not the plain case is left to Python. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL flashlight_fast
#include <numpy/arrayobject.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "fast.h"

#include "../shm/shm.cdef.h"
#include "place.h"
#include "ring.h"

/* How many looks at the other ranks' calls it takes (about 2 us) until the GIL is let go. */
enum { SPINS_WITH_GIL = 100 };
enum { SMALL_BYTES = 4096, LARGE_BYTES = 64 << 10 };

/* What it refers to is kept by the function's `self`, a tuple that begins with the capsule of this:
   the collector of cycles sees into that. */
typedef struct {
  fl_shm_group *group;
  int size;
  double seconds;
  int (*begin)(fl_shm_group *, const fl_signature *, const void *, double);
  int (*ready)(fl_shm_group *, int);
  fl_op *(*finish)(fl_shm_group *, const fl_signature *, void *);
  PyObject *on_failure; /* called with the address of the fl_op; raises */
  PyObject *memory; /* an array: the ring */
  ring *calls;
  PyObject *places;  /* a list: the line of user code of each call of the ring, or None */
  PyObject *package; /* the folder whose code is not the user's */
  PyObject *inside;  /* a set: the threads that are in another call of the group */
} Binding;

static PyObject *name_sum, *name_prod, *name_min, *name_max, *name_avg;

/* The codes of csrc/reduce/reduce.h, or -1 for what is left to Python. */
static int dtype_code(int type) {
  switch (type) {
    case NPY_HALF: return 9;
    case NPY_FLOAT: return 11;
    case NPY_DOUBLE: return 12;
    case NPY_INT: return 3;
    case NPY_LONG: return sizeof(long) == 8 ? 4 : 3;
    default: return -1;
  }
}

/* Names of operations are literals, so that their identity tells them apart. */
static int op_code(PyObject *op, int is_integer, double *scale, int size) {
  if (op == name_sum) return 0;
  if (op == name_avg && !is_integer) {
    *scale /= size;
    return 0;
  }
  if (op == name_prod) return 1;
  if (op == name_min) return 2;
  if (op == name_max) return 3;
  return -1;
}

static int describe_call(PyObject *x, PyObject *scale, PyObject *op, int size, fl_signature *out) {
  if (!PyArray_CheckExact(x) || !PyFloat_CheckExact(scale)) return 0;
  PyArrayObject *array = (PyArrayObject *)x;
  if (!PyArray_ISCARRAY(array)) return 0; /* contiguous, aligned, writeable, native */
  const int code = dtype_code(PyArray_TYPE(array));
  if (code < 0 || PyArray_NDIM(array) > 8) return 0;
  memset(out, 0, sizeof *out);
  out->verb = FL_ALL_REDUCE;
  out->dtype = code;
  out->scale = PyFloat_AsDouble(scale);
  if (!(out->scale - out->scale == 0)) return 0; /* not finite */
  const int is_integer = code < 9;
  if (is_integer && out->scale != 1.0) return 0;
  out->op = op_code(op, is_integer, &out->scale, size);
  if (out->op < 0) return 0;
  describe_array(array, out);
  return 1;
}

/* Note which line this call is on; takes some 200 ns, and nothing is raised. */
static void note_place(const Binding *binding, ring_call *call) {
  PyObject *place = place_of_caller(binding->package);
  if (place != NULL && PyList_SetItem(binding->places, call - binding->calls->calls, place) == 0) {
    call->flags |= RING_PLACED;
  } else {
    PyErr_Clear();
  }
}

/* Wait for the other ranks and reduce. A call notes its line if it has to wait anyway, or if it takes
   so long that nobody will notice. */
static fl_op *finish(const Binding *binding, const fl_signature *signature, void *data,
                     ring_call *call) {
  const int64_t bytes = signature->count * signature->itemsize;
  const int is_small = bytes <= SMALL_BYTES;
  const int ready = binding->ready(binding->group, is_small ? SPINS_WITH_GIL : 0);
  if (is_small && ready) return binding->finish(binding->group, signature, data);
  if (!ready || bytes >= LARGE_BYTES) note_place(binding, call);
  fl_op *failed;
  Py_BEGIN_ALLOW_THREADS;
  failed = binding->finish(binding->group, signature, data);
  Py_END_ALLOW_THREADS;
  return failed;
}

/* Whether this thread is in the middle of a call: it runs a signal handler, which Python answers. */
static int is_inside(const Binding *binding) {
  if (PySet_Size(binding->inside) == 0) return 0;
  PyObject *self = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
  if (self == NULL) return -1;
  const int found = PySet_Contains(binding->inside, self);
  Py_DECREF(self);
  return found;
}

/* all_reduce(x, scale, op): x where it is done, NotImplemented where Python must do it. */
static PyObject *all_reduce(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  const Binding *binding = PyCapsule_GetPointer(PyTuple_GetItem(self, 0), NULL);
  fl_signature signature;
  if (binding == NULL) return NULL;
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "expected (x, scale, op)");
    return NULL;
  }
  PyObject *x = args[0];
  if (binding->calls->off || !describe_call(x, args[1], args[2], binding->size, &signature)) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  const int inside = is_inside(binding);
  if (inside < 0) return NULL;
  void *data = PyArray_DATA((PyArrayObject *)x);
  if (inside || !binding->begin(binding->group, &signature, data, binding->seconds)) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  ring_call *call = ring_begin(binding->calls, &signature);
  const uint64_t number = call->number;
  binding->calls->caller = PyThread_get_thread_ident();
  fl_op *failed = finish(binding, &signature, data, call);
  binding->calls->caller = 0;
  ring_end(call, number, failed != NULL);
  if (failed != NULL) {
    return PyObject_CallFunction(binding->on_failure, "K", (unsigned long long)(uintptr_t)failed);
  }
  Py_INCREF(x);
  return x;
}

static PyMethodDef all_reduce_def = {"all_reduce", (PyCFunction)(void (*)(void))all_reduce,
                                     METH_FASTCALL, NULL};

static void free_binding(PyObject *capsule) { free(PyCapsule_GetPointer(capsule, NULL)); }

/* Check what ring.h takes for granted. */
static int check(Binding *binding) {
  PyArrayObject *memory = (PyArrayObject *)binding->memory;
  if (PyArray_NBYTES(memory) != sizeof(ring) || !PyArray_ISCARRAY(memory) ||
      PyList_Size(binding->places) != RING_CALLS) {
    PyErr_SetString(PyExc_ValueError, "the memory of the ring has another layout");
    return 0;
  }
  binding->calls = PyArray_DATA(memory);
  return 1;
}

/* bind(group, owner, size, seconds, begin, ready, finish, on_failure, memory, places, package,
   inside): addresses as integers; `owner` keeps the group. */
static PyObject *bind(PyObject *module, PyObject *args) {
  unsigned long long group, begin, ready, finish;
  PyObject *owner;
  (void)module;
  Binding *binding = calloc(1, sizeof *binding);
  if (binding == NULL) return PyErr_NoMemory();
  if (!PyArg_ParseTuple(args, "KOidKKKOO!O!UO!", &group, &owner, &binding->size,
                        &binding->seconds, &begin, &ready, &finish, &binding->on_failure,
                        &PyArray_Type, &binding->memory,
                        &PyList_Type, &binding->places, &binding->package, &PySet_Type,
                        &binding->inside) ||
      !check(binding)) {
    free(binding);
    return NULL;
  }
  binding->group = (fl_shm_group *)(uintptr_t)group;
  binding->begin = (int (*)(fl_shm_group *, const fl_signature *, const void *, double))(uintptr_t)begin;
  binding->ready = (int (*)(fl_shm_group *, int))(uintptr_t)ready;
  binding->finish = (fl_op * (*)(fl_shm_group *, const fl_signature *, void *))(uintptr_t)finish;
  PyObject *capsule = PyCapsule_New(binding, NULL, free_binding);
  if (capsule == NULL) {
    free(binding);
    return NULL;
  }
  PyObject *kept = PyTuple_Pack(2, capsule, args);
  Py_DECREF(capsule);
  if (kept == NULL) return NULL;
  PyObject *function = PyCFunction_New(&all_reduce_def, kept);
  Py_DECREF(kept);
  return function;
}

/* The clock of the ring beside time.monotonic_ns(). */
static PyObject *clocks(PyObject *module, PyObject *args) {
  (void)module;
  (void)args;
  const long long ticks = ring_ticks(), nanoseconds = ring_nanoseconds();
  return Py_BuildValue("LL", ticks, nanoseconds);
}

static PyMethodDef methods[] = {
    {"bind", bind, METH_VARARGS, NULL},
    {"clocks", clocks, METH_NOARGS, NULL},
    {"address", address, METH_O, NULL},
    {"describe", (PyCFunction)(void (*)(void))describe, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_fast", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fast(void) {
  import_array();
  name_sum = PyUnicode_InternFromString("sum");
  name_prod = PyUnicode_InternFromString("prod");
  name_min = PyUnicode_InternFromString("min");
  name_max = PyUnicode_InternFromString("max");
  name_avg = PyUnicode_InternFromString("avg");
  if (!name_sum || !name_prod || !name_min || !name_max || !name_avg || !place_names()) return NULL;
  return PyModule_Create(&definition);
}
