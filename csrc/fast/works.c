/* Light Works of started messages and other operations.

   Python handles failures and waits with a timeout: Works of backends/native.py take over. */

#include <pthread.h>

#include "verbs.h"

enum { LEAST_RUNNING = 8 }; /* minimum size of `running` before it is cleaned */

/* Seconds that a wait stays inside the library; signal handlers (Ctrl-C) run in between. */
static const double SLICE_SECONDS = 0.1;

static int forks; /* number of forks between the first process and this one */

typedef struct {
  PyObject_HEAD
  PyObject *owner; /* owner of the binding and the group; NULL after success */
  Binding *binding;
  PyObject *result;     /* return value; with several messages: list of their arrays */
  PyObject *kept;       /* argument of make_work() */
  PyObject *python;     /* the Work that has taken over; or NULL */
  int count;            /* 0: a single operation */
  int source;           /* source rank of a receive; else -1 */
  int forks;            /* value of `forks` at creation */
  int waiting;          /* number of threads that wait in the library for this Work */
  int is_lost;          /* a signal handler raised during hand_over(); the operations are inaccessible */
  started_op one, *ops; /* `ops` is &one, or an array */
} work_object;

static int ops_of(const work_object *work) { return work->count == 0 ? 1 : work->count; }

static void count_fork(void) { ++forks; }

/* After all operations have ended well: free everything except the result. */
static void release(work_object *work) {
  for (int i = 0; i < ops_of(work); ++i) {
    if (work->ops[i].op != NULL) work->ops[i].part->library.free(work->ops[i].op);
    work->ops[i].op = NULL;
  }
  Py_CLEAR(work->kept);
  Py_CLEAR(work->owner);
}

static void free_work(PyObject *self) {
  work_object *work = (work_object *)self;
  PyTypeObject *type = Py_TYPE(self);
  if (work->owner != NULL) release(work);
  if (work->ops != &work->one) PyMem_Free(work->ops);
  Py_CLEAR(work->result);
  Py_CLEAR(work->python);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

/* Keep `work` alive, because the library writes into its arrays. Whenever the number of kept Works has
   doubled, release those that ended well. Failed Works stay for sync_distributed(). 0 with an exception. */
static int track(Binding *binding, PyObject *work) {
  PyObject *running = binding->running;
  if (PyDict_SetItem(running, work, Py_None) < 0) return 0;
  if (PyDict_Size(running) <= binding->most_running) return 1;
  PyObject *all = PyDict_Keys(running);
  for (Py_ssize_t i = 0; all != NULL && i < PyList_Size(all); ++i) {
    PyObject *other = PyList_GetItem(all, i), *ended = PyObject_CallMethod(other, "has_ended_well", NULL);
    if (ended == NULL || (ended == Py_True && PyDict_DelItem(running, other) < 0)) PyErr_Clear();
    Py_XDECREF(ended);
  }
  Py_XDECREF(all);
  const Py_ssize_t limit = 2 * PyDict_Size(running);
  binding->most_running = limit < LEAST_RUNNING ? LEAST_RUNNING : limit;
  return all != NULL;
}

/* After receives ended well: set the source, and return `result` with arrays cut to their received rows, a
   new reference. NULL: an exception. May be called again. */
static PyObject *matched(work_object *work, PyObject *result) {
  const int is_one = work->count == 0, receives = !is_one || work->ops->verb == FL_RECV;
  PyObject *room = is_one && work->kept != NULL ? PyTuple_GetItem(work->kept, 2) : work->kept;
  if (receives && room != NULL && room != Py_None) {
    const fl_match *matches = (const fl_match *)(const void *)PyBytes_AsString(room);
    if (is_one) {
      work->source = matches->source;
      return plain_matched(result, matches);
    }
    for (int i = 0; i < work->count; ++i) {
      if (matches[i].partial == 0) continue;
      PyObject *part = plain_matched(PyList_GetItem(result, i), &matches[i]);
      if (part == NULL || PyList_SetItem(result, i, part) < 0) return NULL;
    }
  }
  Py_INCREF(result);
  return result;
}

/* Finish the Work after all operations ended well; 0 with an exception. */
static int settle(work_object *work) {
  PyObject *previous = work->result, *result = matched(work, previous);
  if (result == NULL) return 0;
  work->result = result;
  Py_DECREF(previous);
  release(work);
  return 1;
}

PyObject *work_for(fl_op *op, const started_op *one, PyObject *x, PyObject *out, PyObject *result, PyObject *room) {
  PyObject *work = PyObject_CallFunction(
      one->part->started, "KiOOOOiiKK", (unsigned long long)(uintptr_t)op, (int)one->verb, x, out, result, room,
      (int)one->root, (int)one->peer, (unsigned long long)one->id,
      (unsigned long long)one->number);
  if (work == NULL && op != NULL) {
    PyObject *const used[] = {x, out, result, room};
    for (int i = 0; i < 4; ++i) Py_INCREF(used[i]);
  }
  return work;
}

PyObject *make_work(PyObject *owner, started_op *ops, int count, PyObject *result, PyObject *kept) {
  Binding *binding = binding_of(owner);
  PyTypeObject *type = (PyTypeObject *)binding->work;
  work_object *work = (work_object *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
  if (work == NULL) { /* leak the objects, because the library may still use them */
    Py_INCREF(result);
    Py_XINCREF(kept);
    return NULL;
  }
  int goes_on = 0;
  work->one = *ops;
  work->ops = count == 0 ? &work->one : ops;
  work->binding = binding;
  work->count = count;
  work->source = count == 0 && ops->verb == FL_RECV ? ops->peer : -1;
  work->forks = forks;
  Py_INCREF(result);
  work->result = result;
  for (int i = 0; i < ops_of(work); ++i) {
    goes_on |= ops[i].op != NULL;
  }
  if (goes_on) {
    Py_INCREF(owner);
    work->owner = owner;
  }
  Py_XINCREF(kept);
  work->kept = kept;
  if (!goes_on && !settle(work)) Py_CLEAR(work);
  if (goes_on && !track(binding, (PyObject *)work)) {
    PyErr_Clear();
    Py_INCREF(work);
  }
  return (PyObject *)work;
}

static PyObject *handed_over(work_object *work, int i) {
  started_op *one = &work->ops[i];
  fl_op *op = one->op;
  one->op = NULL; /* Python frees the operation */
  PyObject *kept = work->kept;
  PyObject *x = work->count == 0 ? PyTuple_GetItem(kept, 0) : PyList_GetItem(work->result, i);
  PyObject *out = work->count == 0 ? PyTuple_GetItem(kept, 1) : Py_None;
  PyObject *room = work->count == 0 ? PyTuple_GetItem(kept, 2) : kept == NULL ? Py_None : kept;
  PyObject *result = work->count == 0 ? work->result : x;
  return x == NULL ? NULL : work_for(op, one, x, out, result, room);
}

/* Let Python's Work take over; 0 with an exception. */
static int hand_over(work_object *work) {
  if (work->python != NULL) return 1;
  if (work->is_lost) {
    PyErr_SetString(PyExc_RuntimeError, "a signal handler has raised in an earlier wait for this operation");
    return 0;
  }
  PyObject *works = PyList_New(0);
  for (int i = 0; works != NULL && i < ops_of(work); ++i) {
    PyObject *one = handed_over(work, i);
    if (one == NULL || PyList_Append(works, one) < 0) Py_CLEAR(works);
    Py_XDECREF(one);
  }
  work->is_lost = works == NULL;
  if (works == NULL) return 0;
  if (work->count == 0) {
    work->python = PyList_GetItem(works, 0);
    Py_INCREF(work->python);
  } else {
    work->python = PyObject_CallFunction(work->binding->together, "O", works);
  }
  Py_DECREF(works);
  if (PyDict_DelItem(work->binding->running, (PyObject *)work) < 0) PyErr_Clear();
  return work->python != NULL;
}

/* Return a failure that has ended an operation of another group than `part`, or FL_PENDING. After a mismatch, the
   group and the other operations go on. */
static fl_status failure_outside(const work_object *work, const Binding *part) {
  for (int i = 0; work->binding->inside != NULL && i < ops_of(work); ++i) {
    const started_op *one = &work->ops[i];
    const fl_status status = one->op == NULL || one->part == part ? FL_PENDING : one->part->library.wait(one->op, 0);
    if (status != FL_OK && status != FL_PENDING && status != FL_MISMATCH) return status;
  }
  return FL_PENDING;
}

/* Wait up to `seconds` for each operation. Return FL_PENDING if one still runs, else a failure or FL_OK. In one
   group, a failure ends all operations. The operations of another group may then run on. */
static fl_status status_of(work_object *work, double seconds) {
  fl_status first_failure = FL_OK;
  for (int i = 0; i < ops_of(work); ++i) {
    const started_op *one = &work->ops[i];
    const fl_status status = one->op == NULL ? FL_OK : one->part->library.wait(one->op, seconds);
    if (status == FL_PENDING) return failure_outside(work, one->part);
    if (first_failure == FL_OK) first_failure = status;
  }
  return first_failure;
}

static int has_ended(const work_object *work) { return work->owner == NULL; }

/* Wait for the end and return FL_OK, or the status that Python must handle; -1 with an exception. */
static int wait_for(work_object *work) {
  PyObject *owner = work->owner; /* the wait may complete and release the operation */
  Py_INCREF(owner);
  fl_status status = status_of(work, 0); /* without releasing the GIL */
  while (status == FL_PENDING && work->python == NULL) {
    ++work->waiting;
    Py_BEGIN_ALLOW_THREADS;
    status = status_of(work, SLICE_SECONDS);
    Py_END_ALLOW_THREADS;
    --work->waiting;
    if (status == FL_PENDING && PyErr_CheckSignals() < 0) {
      Py_DECREF(owner);
      return -1;
    }
  }
  int result = (int)status;
  if (status == FL_OK && work->waiting == 0 && work->python == NULL && work->owner != NULL) {
    if (settle(work)) {
      if (PyDict_DelItem(work->binding->running, (PyObject *)work) < 0) PyErr_Clear();
    } else {
      result = -1;
    }
  }
  Py_DECREF(owner);
  return result;
}

/* wait(timeout=None): return the result, or raise the error. */
static PyObject *wait(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names) {
  work_object *work = (work_object *)self;
  const Py_ssize_t named = names == NULL ? 0 : PyTuple_Size(names);
  const int is_known =
      named == 0 || PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, 0), "timeout") == 0;
  if (count + named > 1 || !is_known) {
    PyErr_SetString(PyExc_TypeError, "wait takes one argument, timeout");
    return NULL;
  }
  PyObject *timeout = count + named == 1 ? args[0] : Py_None;
  if (!has_ended(work)) {
    if (work->forks != forks) return PyObject_CallFunction(work->binding->forked, "i", (int)work->ops[0].verb);
    int status = FL_PENDING;
    if (work->python == NULL && timeout == Py_None && !work->is_lost) status = wait_for(work);
    if (status < 0) return NULL;
    if (status != FL_OK || work->python != NULL) {
      PyObject *result = hand_over(work) ? PyObject_CallMethod(work->python, "wait", "O", timeout) : NULL;
      if (result == NULL) return NULL;
      PyObject *matched_result = matched(work, result);
      Py_DECREF(result);
      return matched_result;
    }
  }
  return matched(work, work->result);
}

static PyObject *is_completed(PyObject *self, PyObject *args) {
  (void)args;
  work_object *work = (work_object *)self;
  if (work->forks != forks || has_ended(work)) Py_RETURN_TRUE;
  if (work->python != NULL) return PyObject_CallMethod(work->python, "is_completed", NULL);
  return PyBool_FromLong(status_of(work, 0) != FL_PENDING);
}

/* Return True if the operations have ended without an error that wait() would raise. */
static PyObject *has_ended_well(PyObject *self, PyObject *args) {
  (void)args;
  work_object *work = (work_object *)self;
  return PyBool_FromLong(work->forks != forks || has_ended(work) || status_of(work, 0) == FL_OK);
}

static PyObject *get_source(PyObject *self, void *closure) {
  (void)closure;
  const int source = ((work_object *)self)->source;
  if (source < 0) Py_RETURN_NONE;
  return PyLong_FromLong(source);
}

static PyMethodDef methods[] = {
    {"wait", (PyCFunction)(void (*)(void))wait, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"is_completed", is_completed, METH_NOARGS, NULL},
    {"has_ended_well", has_ended_well, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef attributes[] = {{"source", get_source, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot slots[] = {
    {Py_tp_dealloc, free_work},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {0, NULL},
};
static PyType_Spec spec = {"flashlight_py._native._fast.Started", sizeof(work_object), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};

PyObject *work_type(void) {
  return pthread_atfork(NULL, NULL, count_fork) == 0 ? PyType_FromSpec(&spec) : NULL;
}
