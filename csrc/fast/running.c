/* Collectives and messages with plain arrays. In a group of one rank: a record, a copy and a scaling. */

#include <string.h>

#include "running.h"

#include "../shm/shm.cdef.h"

/* Number of polls (about 3 us) before this thread releases the GIL. It should rarely do so: a release takes
   so long that the peer, which waits for this rank, would release its GIL too, and so on in later calls. There
   are too few polls to yield the processor (pause_after() in patience.h) while this thread has the GIL. */
enum { SPINS_WITH_GIL = 100, SPINS_FOR_MESSAGES = 400 };
enum { SMALL_BYTES = 4096, LARGE_BYTES = 64 << 10 };

static int is_float(const fl_signature *s) { return s->dtype == FL_FLOAT32 || s->dtype == FL_FLOAT64; }

static int is_gather(const fl_signature *s) { return s->verb == FL_ALL_GATHER || s->verb == FL_GATHER; }

int can_run_alone(const plain_call *call, PyObject *out) {
  const fl_signature *s = &call->signature;
  if (is_message(s->verb)) return 0;
  if (is_gather(s) && out != Py_None && call->rows != s->shape[0]) return 0;
  return s->scale == 1.0 || is_float(s);
}

static void scale(const fl_signature *s, void *data) {
  if (s->dtype == FL_FLOAT32) {
    const float by = (float)s->scale;
    for (int64_t i = 0; i < s->count; ++i) ((float *)data)[i] *= by;
  } else {
    for (int64_t i = 0; i < s->count; ++i) ((double *)data)[i] *= s->scale;
  }
}

void run_alone(const plain_call *call) {
  const fl_signature *s = &call->signature;
  void *to = is_gather(s) ? call->room.data : call->output;
  const size_t bytes = (size_t)(s->count * s->itemsize);
  PyThreadState *thread_state = bytes >= LARGE_BYTES ? PyEval_SaveThread() : NULL;
  if (to != NULL && bytes != 0) memmove(to, call->data, bytes); /* `out` may be the input */
  if (s->scale != 1.0 && s->verb != FL_EXSCAN) scale(s, to == NULL ? call->data : to);
  if (thread_state != NULL) PyEval_RestoreThread(thread_state);
}

PyObject *fetch(Binding *binding, fl_op *op, PyObject *x, PyObject *out, const plain_call *call,
                recorded entry) {
  const fl_signature *s = &call->signature;
  if (entry.row->id == entry.id && (entry.row->flags & FL_RECORDED_PLACED) == 0) note_place(binding, entry.row);
  return PyObject_CallFunction(binding->ended, "KiOOOiK", (unsigned long long)(uintptr_t)op,
                               (int)s->verb, x, out, call->result == NULL ? Py_None : call->result,
                               (int)s->root, (unsigned long long)entry.id);
}

/* Return the part that scatter received without `out`: a copy, if it is small. */
static PyObject *received_part(const Binding *binding, fl_op *op, int root) {
  size_t bytes;
  if (binding->library.wait(op, 0) != FL_OK) return NULL;
  const void *data = binding->library.output(op, &bytes);
  if (data == NULL || bytes > LARGE_BYTES) return NULL;
  PyObject *array = plain_received(&binding->library.signatures(op)[root], data);
  if (array != NULL) binding->library.free(op);
  return array;
}

/* Return the result of a call that has ended, or that `op` describes; takes over call->result. */
static PyObject *end(Binding *binding, fl_op *op, PyObject *x, PyObject *out, plain_call *call,
                     recorded entry) {
  PyObject *result = call->result;
  if (op != NULL) {
    const fl_signature *s = &call->signature;
    result = s->ndim == FL_ANY ? received_part(binding, op, s->root) : NULL;
    if (result == NULL && !PyErr_Occurred()) result = fetch(binding, op, x, out, call, entry);
    Py_XDECREF(call->result);
  }
  ring_end(entry.row, entry.id, result == NULL);
  return result;
}

/* Record the line of user code only if the call must wait or takes long, so that this costs little time. */
fl_op *finish_collective(Binding *binding, const plain_call *call, ring_call *row) {
  const int64_t bytes = call->signature.count * call->signature.itemsize;
  const int is_small = bytes <= SMALL_BYTES;
  int ready = binding->library.ready(binding->group, is_small ? SPINS_WITH_GIL : 0);
  if (is_small && ready == FL_AWAITED && is_hurried(binding, row->id - 1, row->started)) {
    Py_BEGIN_ALLOW_THREADS;
    ready = binding->library.ready(binding->group, -1);
    Py_END_ALLOW_THREADS;
  }
  if (is_small && ready == FL_COMPLETE) {
    return binding->library.finish(binding->group, &call->signature, call->data, call->output);
  }
  const int is_placed = (row->flags & FL_RECORDED_PLACED) != 0;
  if (!is_placed && (ready == FL_AWAITED || bytes >= LARGE_BYTES)) note_place(binding, row);
  fl_op *op;
  Py_BEGIN_ALLOW_THREADS;
  op = binding->library.finish(binding->group, &call->signature, call->data, call->output);
  Py_END_ALLOW_THREADS;
  return op;
}

/* Pass the call site now if this rank may return before others have called: they cannot ask for it later. */
int run_in_steps(Binding *binding, const plain_call *call, const fl_signature *shown, fl_op **op,
                 recorded *entry) {
  static const fl_site not_known = {""};
  PyObject *place = NULL;
  const fl_site *site = NULL;
  if (binding->library.begin == NULL) return 0;
  if (plain_needs_nobody(call, binding->rank)) {
    site = &not_known;
    const int is_soon = is_hurried(binding, binding->calls->written, fl_ticks());
    if (!is_soon && !place_and_site(binding, &place, &site)) return 0;
  }
  if (!binding->library.begin(binding->group, &call->signature, call->data, binding->seconds, site)) return 0;
  *entry = record(binding, shown, -1, 0, place);
  binding->calls->callers[0] = PyThread_get_thread_ident();
  *op = finish_collective(binding, call, entry->row);
  binding->calls->callers[0] = 0;
  return 1;
}

int run_at_once(Binding *binding, const plain_call *call, const fl_signature *shown, fl_op **op,
                recorded *entry) {
  PyObject *place;
  const fl_site *site;
  const int entered = place_and_site(binding, &place, &site) ? enter(binding) : -1;
  if (entered < 0) return 0;
  *entry = record(binding, shown, call->peer, 0, place);
  Py_BEGIN_ALLOW_THREADS;
  *op = binding->library.run(binding->group, &call->signature, call->data, call->output, call->peer, binding->seconds, 0,
                     site);
  Py_END_ALLOW_THREADS;
  leave(binding, entered);
  return 1;
}

PyObject *run_collective(Binding *binding, PyObject *x, PyObject *out, plain_call *call) {
  fl_op *op;
  recorded entry;
  if (is_alone(binding)) {
    entry = record_alone(binding, &call->signature);
    run_alone(call);
    return end(binding, NULL, x, out, call, entry);
  }
  int has_run = run_in_steps(binding, call, &call->signature, &op, &entry);
  /* A call behind other calls may continue after Ctrl-C. By then the buffer of a gather is freed. */
  const int may_wait = binding->library.begin == NULL || call->output != &call->room;
  if (!has_run && may_wait && PyErr_Occurred() == NULL) {
    has_run = run_at_once(binding, call, &call->signature, &op, &entry);
  }
  if (has_run) return end(binding, op, x, out, call, entry);
  Py_XDECREF(call->result);
  if (PyErr_Occurred() != NULL) return NULL;
  Py_RETURN_NOTIMPLEMENTED;
}

void fill_message(const Binding *part, fl_message *message, const plain_call *call, const fl_site *site) {
  message->signature = call->signature;
  message->data = call->data;
  message->peer = number_in(part, call->peer);
  message->site = *site;
  message->match = NULL;
}

int exchange(const Binding *binding, const fl_message *messages, int count, fl_op **ops) {
  const fl_signature *s = &messages[0].signature;
  const int is_small = s->count * s->itemsize <= SMALL_BYTES;
  void *posted = NULL;
  for (int i = 0; i < count; ++i) ops[i] = NULL;
  if (binding->library.post != NULL) {
    posted = binding->library.post(binding->group, messages, count, binding->seconds,
                           is_small ? SPINS_FOR_MESSAGES : -1);
    if (posted == NULL) return 1;
  }
  const int entered = enter(binding);
  Py_BEGIN_ALLOW_THREADS;
  if (posted != NULL) {
    binding->library.deliver(posted, ops);
  } else if (entered >= 0) {
    binding->library.exchange(binding->group, messages, count, binding->seconds, 0, ops);
  }
  Py_END_ALLOW_THREADS;
  if (entered >= 0) {
    leave(binding, entered);
    return 1;
  }
  for (int i = 0; i < count; ++i) {
    if (ops[i] != NULL) binding->library.free(ops[i]);
  }
  return 0;
}

PyObject *run_message(Binding *binding, PyObject *x, PyObject *out, plain_call *call) {
  PyObject *place;
  const fl_site *site;
  if (!place_and_site(binding, &place, &site)) {
    Py_XDECREF(call->result);
    return NULL;
  }
  const recorded entry = record(binding, &call->signature, call->peer, 0, place);
  fl_message message;
  fl_op *op;
  fill_message(binding, &message, call, site);
  message.match = call->output;
  if (!exchange(binding, &message, 1, &op)) {
    Py_XDECREF(call->result);
    ring_end(entry.row, entry.id, 1);
    return NULL;
  }
  PyObject *y = end(binding, op, x, out, call, entry);
  if (y == NULL || call->output == NULL) return y;
  PyObject *matched_rows = plain_matched(y, &call->match);
  Py_DECREF(y);
  return matched_rows;
}

started_op start_one(Binding *binding, const plain_call *call, PyObject *place, const fl_site *site) {
  const fl_signature *s = &call->signature;
  recorded entry;
  fl_op *op = NULL;
  if (is_alone(binding)) {
    entry = record_alone(binding, s);
    entry.row->flags |= FL_RECORDED_ASYNC;
    run_alone(call);
  } else {
    entry = record(binding, s, call->peer, FL_RECORDED_ASYNC, place);
    Py_BEGIN_ALLOW_THREADS;
    op = binding->library.run(binding->group, s, call->data, call->output, number_in(binding, call->peer),
                              binding->seconds, 1, site);
    Py_END_ALLOW_THREADS;
  }
  if (op == NULL) {
    ring_end(entry.row, entry.id, 0);
  } else {
    binding->library.stamp(op, &entry.row->ended, -(int64_t)entry.id);
  }
  return (started_op){binding, op, entry.id, binding->calls->number, s->verb, s->root, call->peer};
}
