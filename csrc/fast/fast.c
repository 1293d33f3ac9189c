/* The module: binding a group of a native library to functions that Python calls. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL flashlight_fast
#include <numpy/arrayobject.h>
#include <stdint.h>
#include <stdlib.h>

#include "binding.h"
#include "plain.h"

static PyMethodDef call_def = {"native", (PyCFunction)(void (*)(void))native_call, METH_FASTCALL, NULL};
static PyMethodDef sendrecv_def = {"native_sendrecv", (PyCFunction)(void (*)(void))native_sendrecv,
                                   METH_FASTCALL, NULL};

static PyMethodDef object_def = {"native_object", (PyCFunction)(void (*)(void))native_object, METH_FASTCALL,
                                 NULL};
static PyMethodDef barrier_def = {"native_barrier", (PyCFunction)(void (*)(void))native_barrier, METH_FASTCALL,
                                  NULL};

static void free_binding(PyObject *capsule) {
  Binding *binding = PyCapsule_GetPointer(capsule, NULL);
  for (int i = 0; i < SITES; ++i) Py_XDECREF(binding->sites[i].place);
  for (int i = 0; i < CODES; ++i) Py_XDECREF(binding->codes[i].code);
  free(binding);
}

/* Check what ring.h takes for granted. */
static int check(Binding *binding) {
  PyArrayObject *memory = (PyArrayObject *)binding->memory;
  if (PyArray_NBYTES(memory) != sizeof(ring) || !PyArray_ISCARRAY(memory) ||
      PyList_Size(binding->notes) != RING_CALLS) {
    PyErr_SetString(PyExc_ValueError, "the memory of the ring has another layout");
    return 0;
  }
  binding->calls = PyArray_DATA(memory);
  return 1;
}

static int parse(PyObject *args, Binding *binding) {
  unsigned long long group, run, exchange, stamp, wait, signatures, output, free_op;
  unsigned long long begin, ready, finish, post, deliver;
  PyObject *owner;
  if (!PyArg_ParseTuple(args, "KOiid(KKKKKKKKKKKK)(OOO)(OOOO!)O!O!O!O!O!", &group, &owner, &binding->rank,
                        &binding->size, &binding->seconds, &run, &exchange, &stamp,
                        &wait, &signatures, &output, &free_op, &begin, &ready,
                        &finish, &post, &deliver, &binding->ended, &binding->started, &binding->here,
                        &binding->together, &binding->forked, &binding->work, &PyDict_Type,
                        &binding->running, &PyArray_Type, &binding->memory, &PyList_Type, &binding->notes,
                        &PyTuple_Type, &binding->folders, &PySet_Type, &binding->inside, &PyTuple_Type, &binding->first)) {
    return 0;
  }
  binding->group = (void *)(uintptr_t)group;
  binding->run = (fl_run)(uintptr_t)run;
  binding->exchange = (fl_exchange)(uintptr_t)exchange;
  binding->stamp = (void (*)(fl_op *, int64_t *, int64_t))(uintptr_t)stamp;
  binding->wait = (fl_status (*)(fl_op *, double))(uintptr_t)wait;
  binding->signatures = (const fl_signature *(*)(fl_op *))(uintptr_t)signatures;
  binding->output = (void *(*)(fl_op *, size_t *))(uintptr_t)output;
  binding->free = (void (*)(fl_op *))(uintptr_t)free_op;
  binding->begin =
      (int (*)(void *, const fl_signature *, const void *, double, const fl_site *))(uintptr_t)begin;
  binding->ready = (int (*)(void *, int))(uintptr_t)ready;
  binding->finish = (fl_op * (*)(void *, const fl_signature *, void *, void *))(uintptr_t)finish;
  binding->post = (void *(*)(void *, const fl_message *, int, double, int))(uintptr_t)post;
  binding->deliver = (void (*)(void *, fl_op **))(uintptr_t)deliver;
  return check(binding);
}

/* bind(group, owner, rank, size, seconds,
   (run, exchange, stamp, wait, signatures, output, free, begin, ready, finish, post, deliver),
   (ended, started, here), (together, forked, work, running), memory, notes, folders, inside, first):
   (native, native_sendrecv, native_object, native_barrier). The group and the library's functions are addresses;
   `owner`
   keeps the group. */
static PyObject *bind(PyObject *module, PyObject *args) {
  (void)module;
  Binding *binding = calloc(1, sizeof *binding);
  if (binding == NULL) return PyErr_NoMemory();
  PyObject *capsule = parse(args, binding) ? PyCapsule_New(binding, NULL, free_binding) : NULL;
  if (capsule == NULL) {
    free(binding);
    return NULL;
  }
  PyObject *kept = PyTuple_Pack(2, capsule, args);
  Py_DECREF(capsule);
  if (kept == NULL) return NULL;
  PyMethodDef *const defs[] = {&call_def, &sendrecv_def, &object_def, &barrier_def};
  enum { WAYS = sizeof defs / sizeof *defs };
  PyObject *all = PyTuple_New(WAYS);
  for (Py_ssize_t i = 0; all != NULL && i < WAYS; ++i) {
    PyObject *way = PyCFunction_New(defs[i], kept);
    if (way == NULL || PyTuple_SetItem(all, i, way) < 0) Py_CLEAR(all);
  }
  Py_DECREF(kept);
  return all;
}

/* The clock of the ring beside time.monotonic_ns(). */
static PyObject *clocks(PyObject *module, PyObject *args) {
  (void)module;
  (void)args;
  const long long ticks = fl_ticks(), nanoseconds = fl_nanoseconds();
  return Py_BuildValue("LL", ticks, nanoseconds);
}

/* bounds(array): (start, end), the addresses between which its elements lie. */
static PyObject *bounds(PyObject *module, PyObject *given) {
  (void)module;
  if (!PyArray_Check(given)) {
    PyErr_SetString(PyExc_TypeError, "expected an array");
    return NULL;
  }
  PyArrayObject *array = (PyArrayObject *)given;
  char *start = PyArray_BYTES(array), *end = start + PyArray_ITEMSIZE(array);
  if (PyArray_SIZE(array) == 0) end = start;
  for (int d = 0; start != end && d < PyArray_NDIM(array); ++d) {
    const npy_intp reach = (PyArray_DIM(array, d) - 1) * PyArray_STRIDE(array, d);
    *(reach < 0 ? &start : &end) += reach;
  }
  return Py_BuildValue("NN", PyLong_FromVoidPtr(start), PyLong_FromVoidPtr(end));
}

static PyMethodDef methods[] = {
    {"bind", bind, METH_VARARGS, NULL},
    {"clocks", clocks, METH_NOARGS, NULL},
    {"verbs", plain_verbs, METH_O, NULL},
    {"bounds", bounds, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_fast", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fast(void) {
  import_array();
  if (!plain_names() || !place_names() || !batch_names() || !object_names()) return NULL;
  PyObject *module = PyModule_Create(&definition), *type = work_type();
  if (module != NULL && type != NULL && PyModule_AddObject(module, "Started", type) == 0) return module;
  Py_XDECREF(type);
  Py_XDECREF(module);
  return NULL;
}
