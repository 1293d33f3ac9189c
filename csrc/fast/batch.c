/* Several messages with plain arrays, begun together. */

#include <limits.h>
#include <string.h>

#include "verbs.h"

/* Fields of a P2POp, which is a tuple: see calls/call.py. */
enum { KIND, ARRAY, PEER, TAG, PARTIAL, FIELDS };

static PyObject *text_send, *text_recv, *text_tag;

int batch_names(void) {
  text_send = PyUnicode_InternFromString("send");
  text_recv = PyUnicode_InternFromString("recv");
  text_tag = PyUnicode_InternFromString("tag");
  return text_send && text_recv && text_tag;
}

/* new(cls, kind, x, peer, tag=0, partial=False): return a P2POp. The Python function `self` makes a P2POp of
   other arguments than literals and ints. */
static PyObject *new_op(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names) {
  const Py_ssize_t named = names == NULL ? 0 : PyTuple_Size(names), given = count - 1 + named;
  int is_plain = given >= TAG && given <= FIELDS && (args[1] == text_send || args[1] == text_recv);
  is_plain = is_plain && (named == 0 || (count == 1 + TAG && named == 1 && PyTuple_GetItem(names, 0) == text_tag));
  if (is_plain) is_plain = PyLong_CheckExact(args[1 + PEER]) && (given <= TAG || PyLong_CheckExact(args[1 + TAG]));
  if (!is_plain) return call_function(self, args, count, names);
  PyTypeObject *type = (PyTypeObject *)args[0];
  PyObject *op = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, FIELDS);
  for (Py_ssize_t i = 0; op != NULL && i < FIELDS; ++i) {
    PyObject *value = i < given ? args[1 + i] : i == TAG ? PyLong_FromLong(0) : Py_False;
    if (i < given || i == PARTIAL) Py_INCREF(value);
    PyTuple_SetItem(op, i, value);
  }
  return op;
}

PyObject *op_maker(PyObject *module, PyObject *function) {
  static PyMethodDef made = {"__new__", (PyCFunction)(void (*)(void))new_op, METH_FASTCALL | METH_KEYWORDS, NULL};
  (void)module;
  return PyCFunction_New(&made, function);
}

typedef struct {
  PyObject *arrays;  /* list: array of each P2POp */
  PyObject *matches; /* bytes with one fl_match per P2POp; NULL: no message needs a match */
  started_op *ops;   /* one per P2POp; its peer is -1 if the peer of the P2POp is None */
  fl_message *messages;
  const Binding **parts; /* group of each message */
  plain_span *spans;
  fl_op **results;
  int capacity, count, sent; /* number of P2POps: all, those read, and those read that have a peer */
} batch;

/* Give the message of the last read P2POp, number `count` - 1, a copy of `match`. 0: an exception. */
static int add_match(batch *all, const fl_match *match) {
  if (all->matches == NULL) {
    const size_t bytes = (size_t)all->capacity * sizeof *match;
    all->matches = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
    if (all->matches == NULL) return 0;
    memset(PyBytes_AsString(all->matches), 0, bytes);
  }
  fl_match *copy = (fl_match *)(void *)PyBytes_AsString(all->matches) + all->count - 1;
  *copy = *match;
  all->messages[all->sent].match = copy;
  return 1;
}

/* Add a message of the array `x`; 0: an exception. */
static int add_message(Binding *part, batch *all, PyObject *x, const plain_call *call, const fl_site *site) {
  const fl_signature *s = &call->signature;
  const char *data = call->data;
  fill_message(part, &all->messages[all->sent], call, site);
  all->parts[all->sent] = part;
  all->spans[all->sent] = (plain_span){data, data + s->count * s->itemsize, s->verb == FL_RECV};
  all->ops[all->count++] = (started_op){.part = part, .verb = s->verb, .root = s->root, .peer = call->peer};
  if (PyList_Append(all->arrays, x) != 0 || (call->output != NULL && !add_match(all, &call->match))) return 0;
  ++all->sent;
  return 1;
}

/* Read one P2POp. Return 1, or 0 if Python must handle the batch. An exception may then be set; the caller
   clears it. */
static int read_message(Binding *binding, PyObject *op, const fl_site *site, batch *all) {
  if (!PyTuple_Check(op) || PyTuple_CheckExact(op) || PyTuple_Size(op) != FIELDS) return 0;
  PyObject *kind = PyTuple_GetItem(op, KIND), *x = PyTuple_GetItem(op, ARRAY), *peer = PyTuple_GetItem(op, PEER);
  if (peer == Py_None) { /* no message */
    all->ops[all->count++] = (started_op){.part = binding, .verb = FL_SEND, .peer = -1};
    return PyList_Append(all->arrays, x) == 0;
  }
  const int sends = kind == text_send || PyUnicode_Compare(kind, text_send) == 0;
  plain_call call;
  if (!plain_message(sends ? FL_SEND : FL_RECV, x, peer, PyTuple_GetItem(op, TAG), PyTuple_GetItem(op, PARTIAL),
                     binding->rank, binding->size, &call)) {
    return 0;
  }
  Binding *part = part_for(binding, call.peer);
  return part != NULL && add_message(part, all, x, &call, site);
}

/* Allocate memory for `count` messages; 0 on failure. */
static int allocate(batch *all, Py_ssize_t count) {
  const size_t one = sizeof *all->messages + sizeof *all->spans + sizeof *all->results + sizeof *all->parts;
  all->capacity = (int)count;
  all->arrays = PyList_New(0);
  all->ops = PyMem_Malloc((size_t)count * sizeof *all->ops);
  all->messages = PyMem_Malloc((size_t)count * one);
  all->spans = (plain_span *)(void *)(all->messages + count);
  all->results = (fl_op **)(void *)(all->spans + count);
  all->parts = (const Binding **)(void *)(all->results + count);
  return all->arrays && all->ops && all->messages;
}

static void release(batch *all) {
  Py_XDECREF(all->arrays);
  Py_XDECREF(all->matches);
  PyMem_Free(all->messages);
  PyMem_Free(all->ops);
}

/* Begin the messages. Adjacent messages of one group begin together. */
static void exchange_all(const batch *all) {
  for (int first = 0, next; first < all->sent; first = next) {
    const Binding *part = all->parts[first];
    for (next = first + 1; next < all->sent && all->parts[next] == part;) ++next;
    part->library.exchange(part->group, &all->messages[first], next - first, part->seconds, 1, &all->results[first]);
  }
}

/* Begin the messages and store their operations in `all->ops`. */
static void begin_all(batch *all) {
  Py_ssize_t bytes = 0; /* to copy a few takes less time than to release the GIL */
  for (int i = 0; i < all->sent; ++i) bytes += all->spans[i].end - all->spans[i].begin;
  PyThreadState *thread_state = bytes > 4096 ? PyEval_SaveThread() : NULL;
  exchange_all(all);
  if (thread_state != NULL) PyEval_RestoreThread(thread_state);
  fl_op **result = all->results;
  for (int i = 0; i < all->count; ++i) {
    if (all->ops[i].peer >= 0) all->ops[i].op = *result++;
  }
}

static PyObject *work_of(PyObject *self, batch *all) {
  PyObject *work = make_work(self, all->ops, all->count, all->arrays, all->matches);
  all->ops = NULL;
  return work;
}

/* Begin the messages with a record for each of them, and return their Work. */
static PyObject *run_batch(PyObject *self, Binding *binding, batch *all, PyObject *place) {
  const fl_message *message = all->messages;
  for (int i = 0; i < all->count; ++i) {
    started_op *started = &all->ops[i];
    if (started->peer < 0) continue;
    started->id = record(binding, &message++->signature, started->peer, FL_RECORDED_ASYNC, place).id;
    started->number = binding->calls->number;
  }
  begin_all(all);
  for (int i = 0; i < all->count; ++i) {
    const started_op *started = &all->ops[i];
    if (started->peer < 0) continue;
    ring_call *row = &binding->calls->calls[(started->id - 1) % FL_RECORDED_CALLS];
    if (started->op == NULL) {
      ring_end(row, started->id, 0);
    } else {
      started->part->library.stamp(started->op, &row->ended, -(int64_t)started->id);
    }
  }
  return work_of(self, all);
}

PyObject *native_batch(PyObject *self, PyObject *ops) {
  Binding *binding = binding_of(self);
  const Py_ssize_t count = PyList_CheckExact(ops) ? PyList_Size(ops) : 0;
  batch all = {0};
  PyObject *place;
  const fl_site *site;
  if (!place_and_site(binding, &place, &site)) return NULL;
  int plain = count > 0 && count < INT_MAX && allocate(&all, count);
  for (Py_ssize_t i = 0; plain && i < count && i < PyList_Size(ops); ++i) {
    plain = read_message(binding, PyList_GetItem(ops, i), site, &all);
  }
  PyObject *work = NULL;
  if (plain && !plain_mixed_up(all.spans, all.sent)) {
    work = run_batch(self, binding, &all, place);
  } else {
    PyErr_Clear(); /* Python then raises the error with its own text */
    work = Py_NewRef(Py_NotImplemented);
  }
  release(&all);
  return work;
}

PyObject *native_apart(PyObject *self, PyObject *const *args, Binding *const *parts, const plain_call *calls) {
  Binding *binding = binding_of(self);
  batch all = {0};
  PyObject *place, *work = NULL, *result = NULL;
  const fl_site *site;
  if (!place_and_site(binding, &place, &site)) return NULL;
  fl_signature shown = calls->signature;
  shown.verb = FL_SENDRECV;
  const recorded entry = record(binding, &shown, calls->peer, 0, place);
  const int entered = enter(binding);
  int is_ready = entered >= 0 && allocate(&all, 2);
  for (int i = 0; is_ready && i < 2; ++i) is_ready = add_message(parts[i], &all, args[2 * i], &calls[i], site);
  if (is_ready) {
    for (int i = 0; i < 2; ++i) all.ops[i].verb = FL_SENDRECV; /* errors name this verb; ended() records them */
    begin_all(&all);
    work = work_of(self, &all);
  }
  release(&all);
  if (work != NULL) {
    result = PyObject_CallFunction(binding->ended, "OiOOOiK", work, FL_SENDRECV, args[0], args[2], args[2], 0,
                                   (unsigned long long)entry.id);
    Py_DECREF(work);
  } else if (PyErr_Occurred() == NULL) {
    PyErr_NoMemory();
  }
  if (entered >= 0) leave(binding, entered);
  ring_end(entry.row, entry.id, result == NULL);
  return result;
}
