/* The module: all verbs with plain NumPy arrays, without Python code.

   A small collective in shared memory takes some 200 ns. Inspecting an array in Python, describing it and
   calling a library takes 5 us. This module reads the array with NumPy's C API and calls the library. Python
   handles other calls and raises the errors. */

#define FAST_IMPORTS_NUMPY
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "verbs.h"

/* Copy the call's fl_match or fl_room, if any, to new bytes that can outlive the call. Else return None. */
static PyObject *kept_room(plain_call *call) {
  const size_t match_bytes = call->output == &call->match ? sizeof call->match : 0;
  const size_t bytes = call->output == &call->room ? sizeof call->room : match_bytes;
  if (bytes == 0) Py_RETURN_NONE;
  PyObject *room = PyBytes_FromStringAndSize(call->output, (Py_ssize_t)bytes);
  if (room != NULL) call->output = PyBytes_AsString(room);
  return room;
}

/* Start a call and return a Work that keeps all objects that the operation uses. */
static PyObject *start(PyObject *self, Binding *part, PyObject *x, PyObject *out, plain_call *call) {
  Binding *binding = binding_of(self);
  const fl_signature *s = &call->signature;
  PyObject *place = NULL, *room = kept_room(call);
  const fl_site *site;
  if (room == NULL || (!is_alone(binding) && !place_and_site(binding, &place, &site))) {
    Py_XDECREF(call->result);
    Py_XDECREF(room);
    return NULL;
  }
  started_op started_operation = start_one(part, call, place, site);
  PyObject *result = call->result == NULL ? Py_None : call->result, *work = NULL;
  const int makes_result = s->verb == FL_GATHER || s->verb == FL_ALL_GATHER || s->verb == FL_SCATTER;
  if (started_operation.op != NULL && makes_result) {
    work = work_for(started_operation.op, &started_operation, x, out, result, room);
  } else {
    PyObject *kept = PyTuple_Pack(3, x, out, room);
    if (kept != NULL) work = make_work(self, &started_operation, 0, result, kept);
    Py_XDECREF(kept);
  }
  Py_XDECREF(call->result);
  Py_DECREF(room);
  return work;
}

static int can_run(const Binding *binding, PyObject *x, PyObject *out, const plain_call *call, int is_async) {
  const fl_signature *s = &call->signature;
  if (is_alone(binding)) return can_run_alone(call, out);
  if (binding->most == NULL) return 1;
  /* The match of a started receive has the source as a number of the group that runs the receive. */
  if (is_message(s->verb)) return !is_async || call->output == NULL;
  return !is_async && !PyTuple_Check(x) && runs_here(binding, s->verb, s->count * s->itemsize);
}

enum { ARGUMENTS = 8 };

/* Run native_call for arrays. is_left_to_python() has returned 0 before. */
static PyObject *call_arrays(PyObject *self, PyObject *const *args) {
  Binding *binding = binding_of(self);
  PyObject *x = args[1], *out = args[2];
  plain_call call;
  int32_t verb = -1;
  const int is_async = PyObject_IsTrue(args[7]);
  if (is_async < 0) return NULL;
  plain_int(args[0], FL_SENDRECV, &verb);
  if (verb == FL_ALL_REDUCE && PyBool_Check(out)) return native_several(self, args, is_async);
  const int has_rows = verb == FL_ALL_TO_ALL && (PyList_CheckExact(args[3]) || PyTuple_CheckExact(args[3]));
  if (has_rows && !is_async) return native_uneven(binding, x, out, args[3]);
  const int plain = plain_read(args, binding->rank, binding->size, &call);
  if (plain < 0) return NULL;
  if (!plain) Py_RETURN_NOTIMPLEMENTED;
  const int is_one = is_message(call.signature.verb);
  Binding *part = is_one ? part_for(binding, call.peer) : binding;
  if (part == NULL || !can_run(binding, x, out, &call, is_async)) {
    Py_XDECREF(call.result);
    Py_RETURN_NOTIMPLEMENTED;
  }
  if (is_one) { /* a message; a blocking send has no result */
    call.result = Py_NewRef(call.signature.verb == FL_SEND && !is_async ? Py_None : x);
  }
  if (is_async) return start(self, part, x, out, &call);
  if (is_one) return run_message(part, x, out, &call);
  return run_collective(binding, x, out, &call);
}

static int is_strided(PyObject *x) {
  PyArrayObject *array = (PyArrayObject *)x;
  return PyArray_CheckExact(x) && !PyArray_IS_C_CONTIGUOUS(array) && PyArray_ISWRITEABLE(array);
}

/* Run a blocking call of a number or of strided arrays on contiguous copies. Copy the result back, or return a
   number of the same kind. */
static PyObject *call_copies(PyObject *self, PyObject *const *args, int is_number) {
  PyObject *call_args[ARGUMENTS], *result = NULL;
  memcpy(call_args, args, sizeof call_args);
  if (is_number) call_args[1] = plain_of_number(args[1]);
  for (int i = 1; i <= 2; ++i) {
    if (is_strided(args[i])) call_args[i] = PyArray_NewCopy((PyArrayObject *)args[i], NPY_CORDER);
  }
  if (call_args[1] != NULL && call_args[2] != NULL) result = call_arrays(self, call_args);
  for (int i = 1; i <= 2; ++i) {
    PyObject *const copy = call_args[i], *const original = args[i];
    if (copy == original || copy == NULL) continue;
    if (result == copy) {
      Py_DECREF(result);
      if (is_number) {
        result = plain_number_of((PyArrayObject *)copy, original);
      } else {
        result = PyArray_CopyInto((PyArrayObject *)original, (PyArrayObject *)copy) < 0 ? NULL : original;
        Py_XINCREF(result);
      }
    }
    Py_DECREF(copy);
  }
  return result;
}

/* native(verb, x, out, op, scale, root or peer, tag, async_op): return the result or a Work; NotImplemented,
   without effect, if Python must handle the call. In place of `op`, all_to_all may have `rows` (a list or
   tuple) and a receive `partial`. In place of `out`, an all_reduce of a list has a bool: see native_several. */
PyObject *native_call(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  const Binding *binding = binding_of(self);
  if (binding == NULL) return NULL;
  if (count != ARGUMENTS) return PyErr_Format(PyExc_TypeError, "expected 8 arguments, got %zd", count);
  const int is_left = is_left_to_python(binding);
  if (is_left < 0) return NULL;
  if (is_left) Py_RETURN_NOTIMPLEMENTED;
  const int is_blocking = args[7] == Py_False;
  const int is_plain = !is_blocking || args[3] == Py_True; /* True: a receive that returns part of `x` */
  if (!is_plain && (is_strided(args[1]) || is_strided(args[2]))) return call_copies(self, args, 0);
  const int is_number = is_blocking && plain_has_number(args);
  return is_number ? call_copies(self, args, 1) : call_arrays(self, args);
}

/* native_sendrecv(x, dst, out, src, tag, recv_tag or None): return out, or NotImplemented. dst None: no send;
   src None: no receive. native_sendrecv(ops), or a recv_tag of Ellipsis: return the Work of the batch. */
PyObject *native_sendrecv(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Binding *binding = binding_of(self);
  if (binding == NULL) return NULL;
  if (count != 6 && count != 1) {
    return PyErr_Format(PyExc_TypeError, "expected (x, dst, out, src, tag, recv_tag), or (ops)");
  }
  const int is_left = is_left_to_python(binding);
  if (is_left < 0) return NULL;
  const int is_batch = count == 1 || args[5] == Py_Ellipsis;
  const int is_incomplete = args[0] == Py_Ellipsis || (!is_batch && args[2] == Py_Ellipsis); /* see entry.c */
  if (is_left || is_incomplete || is_alone(binding)) Py_RETURN_NOTIMPLEMENTED;
  if (is_batch) return native_batch(self, args[0]);
  const int rank = binding->rank, size = binding->size;
  const int sends = args[1] != Py_None, receives = args[3] != Py_None, is_pair = sends && receives;
  plain_call calls[2], *const received = &calls[sends]; /* send first, because a peer may wait for it */
  PyObject *recv_tag = args[args[5] == Py_None ? 4 : 5];
  if ((sends && !plain_message(FL_SEND, args[0], args[1], args[4], Py_False, rank, size, calls)) ||
      (receives && !plain_message(FL_RECV, args[2], args[3], recv_tag, Py_False, rank, size, received)) ||
      (is_pair && plain_overlap(calls, received))) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  if (!sends && !receives) return Py_NewRef(args[2]);
  Binding *const parts[] = {part_for(binding, calls->peer), part_for(binding, calls[is_pair].peer)};
  if (parts[0] == NULL || parts[1] == NULL) Py_RETURN_NOTIMPLEMENTED;
  if (parts[0] != parts[1]) return native_apart(self, args, parts, calls);
  PyObject *place;
  const fl_site *site;
  if (!place_and_site(binding, &place, &site)) return NULL;
  fl_signature shown = calls->signature;
  if (is_pair) shown.verb = FL_SENDRECV;
  const recorded entry = record(binding, &shown, calls->peer, 0, place);
  fl_message messages[2];
  fl_op *ops[2] = {NULL, NULL};
  for (int i = 0; i <= is_pair; ++i) fill_message(parts[0], &messages[i], &calls[i], site);
  if (!exchange(parts[0], messages, 1 + is_pair, ops)) {
    ring_end(entry.row, entry.id, 1);
    return NULL;
  }
  PyObject *result = args[2];
  if (ops[0] == NULL && ops[1] == NULL) {
    Py_INCREF(result);
  } else {
    result = PyObject_CallFunction(parts[0]->ended, "(KK)iOOOiK", (unsigned long long)(uintptr_t)ops[0],
                                   (unsigned long long)(uintptr_t)ops[1], FL_SENDRECV, args[0], result, result, 0,
                                   (unsigned long long)entry.id);
  }
  ring_end(entry.row, entry.id, result == NULL);
  return result;
}

#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL

static PyMethodDef functions[] = {
    {"native", FAST(native_call)},
    {"native_sendrecv", FAST(native_sendrecv)},
    {"native_object", FAST(native_object)},
};

static void free_binding(PyObject *capsule) {
  Binding *binding = PyCapsule_GetPointer(capsule, NULL);
  for (int i = 0; i < SITES; ++i) Py_XDECREF(binding->sites[i].place);
  for (int i = 0; i < CODES; ++i) Py_XDECREF(binding->codes[i].code);
  free(binding);
}

static int parse(PyObject *args, Binding *b) {
  PyObject *group, *owner, *most, *inside, *ranks, *addresses;
  if (!PyArg_ParseTuple(args, "OOiid(LL)(OOO)O!(OOO)(OOOO!)O!O!O!O!(O!O)", &group, &owner, &b->rank, &b->size, &b->seconds,
                        &b->packed_bytes[0], &b->packed_bytes[1], &most, &inside, &ranks, &PyTuple_Type,
                        &addresses, &b->ended, &b->started, &b->here, &b->together, &b->forked, &b->work, &PyDict_Type,
                        &b->running, &PyArray_Type, &b->memory, &PyList_Type, &b->notes, &PyTuple_Type,
                        &b->folders, &PySet_Type, &b->threads, &PyList_Type, &b->first, &b->dropped)) {
    return 0;
  }
  size_t library[sizeof b->library / sizeof(size_t)];
  const Py_ssize_t count = sizeof library / sizeof *library;
  PyArrayObject *memory = (PyArrayObject *)b->memory;
  if (PyTuple_Size(addresses) != count || PyArray_NBYTES(memory) != sizeof(ring) || !PyArray_ISCARRAY(memory) ||
      PyList_Size(b->notes) != FL_RECORDED_CALLS) { /* ring.h and the functions of the library assume these sizes */
    PyErr_SetString(PyExc_ValueError, "bind: the ring or the list of functions has an unexpected size");
    return 0;
  }
  for (Py_ssize_t i = 0; i < count; ++i) library[i] = PyLong_AsSize_t(PyTuple_GetItem(addresses, i));
  memcpy(&b->library, library, sizeof library);
  b->group = PyLong_AsVoidPtr(group);
  b->most = most == Py_None ? NULL : PyArray_DATA((PyArrayObject *)most);
  b->ranks = ranks == Py_None ? NULL : PyArray_DATA((PyArrayObject *)ranks);
  b->inside = inside == Py_None ? NULL : binding_of(PyCFunction_GetSelf(inside));
  b->calls = PyArray_DATA(memory);
  return !PyErr_Occurred();
}

/* bind(group, owner, rank, size, seconds, packed_bytes, (most, inside, ranks),
     (run, exchange, stamp, wait, signatures, output, free, begin, ready, finish, post, deliver),
     (ended, started, here), (together, forked, work, running), memory, notes, folders, threads,
     (first, dropped)):
   return (native, native_sendrecv, native_object). The group and the library's functions are addresses;
   `owner` keeps the group alive. */
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
  const Py_ssize_t count = sizeof functions / sizeof *functions;
  PyObject *all = PyTuple_New(count);
  for (Py_ssize_t i = 0; all != NULL && i < count; ++i) {
    PyObject *function = PyCFunction_New(&functions[i], kept);
    if (function == NULL || PyTuple_SetItem(all, i, function) < 0) Py_CLEAR(all);
  }
  Py_DECREF(kept);
  return all;
}

/* Return the time of the ring's clock and of time.monotonic_ns(), taken together. */
static PyObject *clocks(PyObject *module, PyObject *args) {
  (void)module;
  (void)args;
  const long long ticks = fl_ticks(), nanoseconds = fl_nanoseconds();
  return Py_BuildValue("LL", ticks, nanoseconds);
}

/* bounds(array): return (start, end), the address range of its elements. */
static PyObject *bounds(PyObject *module, PyObject *argument) {
  (void)module;
  if (!PyArray_Check(argument)) return PyErr_Format(PyExc_TypeError, "expected an array");
  PyArrayObject *array = (PyArrayObject *)argument;
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
    {"op_maker", op_maker, METH_O, NULL},
    {"verbs", plain_verbs, METH_O, NULL},
    {"bounds", bounds, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_fast", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fast(void) {
  import_array();
  if (!plain_names() || !binding_names() || !batch_names() || !object_names()) return NULL;
  PyObject *module = PyModule_Create(&definition), *const types[] = {work_type(), entry_type()};
  for (int i = 0; i < 2; ++i) {
    const int is_added = module && types[i] && PyModule_AddType(module, (PyTypeObject *)types[i]) == 0;
    if (!is_added) Py_CLEAR(module);
    Py_XDECREF(types[i]);
  }
  return module;
}
