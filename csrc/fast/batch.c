/* Several messages of plain arrays, begun at once. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define NO_IMPORT_ARRAY
#define PY_ARRAY_UNIQUE_SYMBOL flashlight_fast
#include <numpy/arrayobject.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "binding.h"

static PyObject *text_send;

int batch_names(void) {
  text_send = PyUnicode_InternFromString("send");
  return text_send != NULL;
}

typedef struct {
  PyObject *arrays; /* a list: the array of each P2POp */
  PyObject *matches; /* bytes: the fl_match of each, of those that need one; or NULL */
  started_op *ops;   /* of each; without a peer where that is nobody */
  fl_message *messages;
  fl_op **results;
  int count, sent; /* P2POps, and those of them that are messages */
} batch;

/* Give the message of the last op a copy of `match`, which lives as long as its operation; 0 with an
   exception. */
static int add_match(batch *all, const fl_match *match, Py_ssize_t count) {
  if (all->matches == NULL) {
    all->matches = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof *match);
    if (all->matches == NULL) return 0;
    memset(PyBytes_AsString(all->matches), 0, (size_t)count * sizeof *match);
  }
  fl_match *own = (fl_match *)(void *)PyBytes_AsString(all->matches) + all->count - 1;
  *own = *match;
  all->messages[all->sent].match = own;
  return 1;
}

/* What a P2POp (calls/call.py) says, one of `count`: 1, or 0 with or without an exception. It is a tuple. */
static int read_message(const Binding *binding, PyObject *op, batch *all, Py_ssize_t count) {
  enum { KIND, ARRAY, PEER, TAG, PARTIAL, FIELDS };
  if (!PyTuple_Check(op) || PyTuple_CheckExact(op) || PyTuple_Size(op) != FIELDS) return 0;
  PyObject *kind = PyTuple_GetItem(op, KIND), *x = PyTuple_GetItem(op, ARRAY), *peer = PyTuple_GetItem(op, PEER);
  started_op *one = &all->ops[all->count++];
  *one = (started_op){.verb = FL_SEND, .peer = -1};
  if (PyList_Append(all->arrays, x) != 0) return 0;
  if (peer == Py_None) return 1; /* nobody */
  const int sends = kind == text_send || PyUnicode_Compare(kind, text_send) == 0;
  plain_call call;
  if (!plain_message(sends ? FL_SEND : FL_RECV, x, peer, PyTuple_GetItem(op, TAG), PyTuple_GetItem(op, PARTIAL),
                     binding->rank, binding->size, &call)) {
    return 0;
  }
  fl_message *message = &all->messages[all->sent];
  message->signature = call.signature;
  message->data = call.data;
  message->peer = call.peer;
  message->match = NULL;
  *one = (started_op){.verb = call.signature.verb, .root = call.signature.root, .peer = call.peer};
  if (call.output != NULL && !add_match(all, &call.match, count)) return 0;
  ++all->sent;
  return 1;
}

/* Room for `count` messages; 0: there is none. */
static int allocate(batch *all, Py_ssize_t count) {
  all->arrays = PyList_New(0);
  all->messages = PyMem_Malloc((size_t)count * sizeof *all->messages);
  all->ops = PyMem_Malloc((size_t)count * sizeof *all->ops);
  all->results = PyMem_Malloc((size_t)count * sizeof(fl_op *));
  return all->arrays && all->messages && all->ops && all->results;
}

static void release(batch *all) {
  Py_XDECREF(all->arrays);
  Py_XDECREF(all->matches);
  PyMem_Free(all->messages);
  PyMem_Free(all->ops);
  PyMem_Free(all->results);
}

static int by_address(const void *one, const void *other) {
  const char *a = (*(fl_message *const *)one)->data, *b = (*(fl_message *const *)other)->data;
  return (a > b) - (a < b);
}

/* Whether an array that is filled shares memory with another one, which is an error that Python words. */
static int is_mixed_up(const batch *all) {
  const fl_message **sorted = (const fl_message **)(void *)all->results; /* not yet used */
  for (int i = 0; i < all->sent; ++i) sorted[i] = &all->messages[i];
  qsort(sorted, (size_t)all->sent, sizeof *sorted, by_address);
  const char *end = NULL, *end_filled = NULL;
  for (int i = 0; i < all->sent; ++i) {
    const fl_signature *s = &sorted[i]->signature;
    const char *begin = sorted[i]->data, *own_end = begin + s->count * s->itemsize;
    if (own_end == begin) continue;
    const int is_filled = s->verb == FL_RECV;
    if (begin < end_filled || (is_filled && begin < end)) return 1;
    if (end == NULL || own_end > end) end = own_end;
    if (is_filled && (end_filled == NULL || own_end > end_filled)) end_filled = own_end;
  }
  return 0;
}

static PyObject *begin_all(PyObject *self, Binding *binding, batch *all) {
  PyObject *place;
  const fl_site *site;
  if (!place_and_site(binding, &place, &site)) return NULL;
  fl_message *message = all->messages;
  for (int i = 0; i < all->count; ++i) {
    started_op *one = &all->ops[i];
    if (one->peer < 0) continue;
    message->site = *site;
    one->id = record(binding, &message++->signature, one->peer, RING_ASYNC, place).id;
    one->number = binding->calls->number;
  }
  if (all->sent > 0) { /* else a refusal would be told of in nobody's message */
    Py_BEGIN_ALLOW_THREADS;
    binding->exchange(binding->group, all->messages, all->sent, binding->seconds, 1, all->results);
    Py_END_ALLOW_THREADS;
  }
  fl_op **result = all->results;
  for (int i = 0; i < all->count; ++i) {
    started_op *one = &all->ops[i];
    if (one->peer < 0) continue;
    ring_call *row = &binding->calls->calls[(one->id - 1) % RING_CALLS];
    one->op = *result++;
    if (one->op == NULL) {
      ring_end(row, one->id, 0);
    } else {
      binding->stamp(one->op, &row->ended, -(int64_t)one->id);
    }
  }
  PyObject *work = make_work(self, all->ops, all->count, all->arrays, all->matches);
  all->ops = NULL;
  return work;
}

PyObject *native_batch(PyObject *self, PyObject *ops) {
  Binding *binding = binding_of(self);
  const Py_ssize_t count = PyList_CheckExact(ops) ? PyList_Size(ops) : 0;
  batch all = {0};
  int plain = count > 0 && count < INT_MAX && allocate(&all, count);
  for (Py_ssize_t i = 0; plain && i < count && i < PyList_Size(ops); ++i) {
    plain = read_message(binding, PyList_GetItem(ops, i), &all, count);
  }
  PyObject *work = NULL;
  if (plain && !is_mixed_up(&all)) {
    work = begin_all(self, binding, &all);
  } else {
    PyErr_Clear(); /* which Python raises again, in its words */
    Py_INCREF(Py_NotImplemented);
    work = Py_NotImplemented;
  }
  release(&all);
  return work;
}
