/* Several messages of plain arrays, begun at once. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define NO_IMPORT_ARRAY
#define PY_ARRAY_UNIQUE_SYMBOL flashlight_fast
#include <numpy/arrayobject.h>
#include <string.h>

#include "binding.h"

enum { MOST_MESSAGES = 16 };

static PyObject *name_kind, *name_peer, *name_tag, *name_partial, *name_x, *text_send;

int batch_names(void) {
  name_kind = PyUnicode_InternFromString("kind");
  name_peer = PyUnicode_InternFromString("peer");
  name_tag = PyUnicode_InternFromString("tag");
  name_partial = PyUnicode_InternFromString("partial");
  name_x = PyUnicode_InternFromString("x");
  text_send = PyUnicode_InternFromString("send");
  return name_kind && name_peer && name_tag && name_partial && name_x && text_send;
}

typedef struct {
  PyObject *x[MOST_MESSAGES]; /* references of its own */
  plain_call calls[MOST_MESSAGES];
  fl_message messages[MOST_MESSAGES];
  recorded made[MOST_MESSAGES];
  int count;
} batch;

/* What a P2POp (calls/call.py) says: 1, or 0 with or without an exception. */
static int read_message(const Binding *binding, PyObject *op, batch *all) {
  PyObject *kind = PyObject_GetAttr(op, name_kind), *peer = PyObject_GetAttr(op, name_peer);
  PyObject *tag = PyObject_GetAttr(op, name_tag), *partial = PyObject_GetAttr(op, name_partial);
  PyObject *x = PyObject_GetAttr(op, name_x);
  int plain = 0;
  if (kind != NULL && peer != NULL && tag != NULL && x != NULL && partial == Py_False &&
      PyUnicode_Check(kind)) {
    const int sends = PyUnicode_Compare(kind, text_send) == 0;
    plain = plain_message(sends ? FL_SEND : FL_RECV, x, peer, tag, binding->rank, binding->size,
                          &all->calls[all->count]);
  }
  Py_XDECREF(kind);
  Py_XDECREF(peer);
  Py_XDECREF(tag);
  Py_XDECREF(partial);
  if (plain) {
    all->x[all->count++] = x;
  } else {
    Py_XDECREF(x);
  }
  return plain;
}

/* Whether an array that is filled shares memory with another one, which is an error that Python words. */
static int is_mixed_up(const batch *all) {
  for (int i = 0; i < all->count; ++i) {
    if (all->calls[i].signature.verb != FL_RECV) continue;
    for (int j = 0; j < all->count; ++j) {
      if (i != j && plain_overlap(&all->calls[i], &all->calls[j])) return 1;
    }
  }
  return 0;
}

static void release(batch *all) {
  for (int i = 0; i < all->count; ++i) Py_DECREF(all->x[i]);
}

/* What becomes of message `i`: its array where it has ended, or a Work. */
static PyObject *work_of(const Binding *binding, const batch *all, int i, fl_op *op) {
  const plain_call *call = &all->calls[i];
  ring_call *row = all->made[i].row;
  const uint64_t id = all->made[i].id;
  if (op == NULL) {
    ring_end(row, id, 0);
    Py_INCREF(all->x[i]);
    return all->x[i];
  }
  binding->stamp(op, &row->ended, -(int64_t)id);
  return work_for(binding, op, call, all->x[i], Py_None, all->x[i], Py_None, id);
}

static PyObject *begin_all(Binding *binding, batch *all) {
  PyObject *place;
  const fl_site *site;
  if (!place_and_site(binding, &place, &site)) return NULL;
  for (int i = 0; i < all->count; ++i) {
    const plain_call *call = &all->calls[i];
    all->made[i] = record(binding, &call->signature, call->peer, RING_ASYNC, place);
    fill_message(&all->messages[i], call, site);
  }
  fl_op *ops[MOST_MESSAGES];
  Py_BEGIN_ALLOW_THREADS;
  binding->exchange(binding->group, all->messages, all->count, binding->seconds, 1, ops);
  Py_END_ALLOW_THREADS;
  PyObject *works = PyList_New(all->count), *kind = NULL, *error = NULL, *trace = NULL;
  for (int i = 0; i < all->count; ++i) { /* all of them, as all have been started */
    /* With an exception set nothing may be called; the first one counts. */
    kind == NULL ? PyErr_Fetch(&kind, &error, &trace) : PyErr_Clear();
    PyObject *work = work_of(binding, all, i, ops[i]);
    if (work == NULL || works == NULL) {
      Py_XDECREF(work);
    } else {
      PyList_SetItem(works, i, work);
    }
  }
  if (kind != NULL) PyErr_Restore(kind, error, trace);
  if (PyErr_Occurred() != NULL) Py_CLEAR(works);
  return works;
}

PyObject *native_batch(Binding *binding, PyObject *ops) {
  batch all;
  all.count = 0;
  const Py_ssize_t count = PyList_CheckExact(ops) ? PyList_Size(ops) : 0;
  int plain = count > 0 && count <= MOST_MESSAGES;
  for (Py_ssize_t i = 0; plain && i < count; ++i) {
    plain = read_message(binding, PyList_GetItem(ops, i), &all);
  }
  PyObject *works = NULL;
  if (plain && !is_mixed_up(&all)) {
    works = begin_all(binding, &all);
  } else {
    PyErr_Clear(); /* which Python raises again, in its words */
    Py_INCREF(Py_NotImplemented);
    works = Py_NotImplemented;
  }
  release(&all);
  return works;
}
