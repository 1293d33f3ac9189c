/* Every verb of plain NumPy arrays, without a detour through Python.

   In shared memory a small collective takes some 200 ns; to look at an array from Python, to
   describe it and to call a library takes 5 us. This reads the array itself (NumPy's C API) and calls
   the library. Whatever is not plain is left to Python, which also words the errors. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define NO_IMPORT_ARRAY
#define PY_ARRAY_UNIQUE_SYMBOL flashlight_fast
#include <numpy/arrayobject.h>
#include <string.h>

#include "binding.h"
#include "plain.h"

#include "../shm/shm.cdef.h"

/* How many looks at what has come it takes (about 3 us) until the GIL is let go. To let it go takes so long that
   the peer, which waits for this rank meanwhile, would do so too from then on: it must be rare. */
enum { SPINS_WITH_GIL = 100, SPINS_FOR_MESSAGES = 400 };
enum { SMALL_BYTES = 4096, LARGE_BYTES = 64 << 10 };
enum { CALLERS = sizeof((ring *)0)->callers / sizeof *((ring *)0)->callers };

/* `place`: its line if known. */
recorded record(const Binding *binding, const fl_signature *signature, int peer, int flags,
                PyObject *place) {
  ring_call *row = ring_begin(binding->calls, signature, peer, flags);
  if (place != NULL) {
    Py_INCREF(place);
    if (PyList_SetItem(binding->notes, row - binding->calls->calls, place) == 0) {
      row->flags |= RING_PLACED;
    } else {
      PyErr_Clear();
    }
  }
  return (recorded){row, row->id};
}

/* Note which line this call is on; takes some 200 ns, and nothing is raised. */
static void note_place(Binding *binding, ring_call *row) {
  PyObject *place = place_of_caller(binding);
  if (place != NULL && PyList_SetItem(binding->notes, row - binding->calls->calls, place) == 0) {
    row->flags |= RING_PLACED;
  } else {
    PyErr_Clear();
  }
}

int is_left_to_python(const Binding *binding) {
  if (binding->calls->off) return 1;
  for (Py_ssize_t i = 0; i < PyTuple_Size(binding->first); ++i) {
    if (PyObject_Size(PyTuple_GetItem(binding->first, i)) != 0) return 1;
  }
  return 0;
}

int is_inside(const Binding *binding) {
  const unsigned long thread = PyThread_get_thread_ident();
  for (int i = 0; i < CALLERS; ++i) {
    if (binding->calls->callers[i] == thread) return 1;
  }
  if (PySet_Size(binding->inside) == 0) return 0;
  PyObject *self = PyLong_FromUnsignedLong(thread);
  if (self == NULL) return -1;
  const int found = PySet_Contains(binding->inside, self);
  Py_DECREF(self);
  return found;
}

PyObject *fetch(const Binding *binding, fl_op *op, PyObject *x, PyObject *out, const plain_call *call,
                recorded made) {
  const fl_signature *s = &call->signature;
  return PyObject_CallFunction(binding->ended, "KiOOOiKd", (unsigned long long)(uintptr_t)op,
                               (int)s->verb, x, out, call->result == NULL ? Py_None : call->result,
                               (int)s->root, (unsigned long long)made.id, call->seconds);
}

/* What a rank receives that has called scatter without a place for it: a copy, where it is small. */
static PyObject *received_part(const Binding *binding, fl_op *op, int root) {
  size_t bytes;
  if (binding->wait(op, 0) != FL_OK) return NULL;
  const void *data = binding->output(op, &bytes);
  if (data == NULL || bytes > LARGE_BYTES) return NULL;
  PyObject *array = plain_received(&binding->signatures(op)[root], data);
  if (array != NULL) binding->free(op);
  return array;
}

/* The result of a call that has ended, or that `op` describes; takes over call->result. */
static PyObject *end(const Binding *binding, fl_op *op, PyObject *x, PyObject *out, plain_call *call,
                     recorded made) {
  PyObject *result = call->result;
  if (op != NULL) {
    const fl_signature *s = &call->signature;
    result = s->ndim == FL_ANY ? received_part(binding, op, s->root) : NULL;
    if (result == NULL && !PyErr_Occurred()) result = fetch(binding, op, x, out, call, made);
    Py_XDECREF(call->result);
  }
  ring_end(made.row, made.id, result == NULL);
  return result;
}

/* Whether it is not worth the 200 ns to note where a call is: one soon after another, but for the first. */
static int is_hurried(const Binding *binding, uint64_t before, int64_t now) {
  enum { FIRST_CALLS = 2000, SOON_TICKS = 50000 };
  const ring *calls = binding->calls;
  return calls->number >= FIRST_CALLS && now - calls->calls[(before - 1) % RING_CALLS].started < SOON_TICKS;
}

recorded record_alone(Binding *binding, const fl_signature *shown) {
  const int is_soon = is_hurried(binding, binding->calls->written, fl_ticks());
  const recorded made = record(binding, shown, -1, 0, NULL);
  if (!is_soon) note_place(binding, made.row);
  return made;
}

/* A call notes its line if it has to wait anyway, or if it takes so long that nobody will notice. */
fl_op *finish_collective(Binding *binding, const plain_call *call, ring_call *row) {
  const int64_t bytes = call->signature.count * call->signature.itemsize;
  const int is_small = bytes <= SMALL_BYTES;
  int ready = binding->ready(binding->group, is_small ? SPINS_WITH_GIL : 0);
  if (is_small && ready == FL_AWAITED && is_hurried(binding, row->id - 1, row->started)) {
    Py_BEGIN_ALLOW_THREADS;
    ready = binding->ready(binding->group, -1);
    Py_END_ALLOW_THREADS;
  }
  if (is_small && ready == FL_COMPLETE) {
    return binding->finish(binding->group, &call->signature, call->data, call->output);
  }
  const int is_placed = (row->flags & RING_PLACED) != 0;
  if (!is_placed && (ready == FL_AWAITED || bytes >= LARGE_BYTES)) note_place(binding, row);
  fl_op *op;
  Py_BEGIN_ALLOW_THREADS;
  op = binding->finish(binding->group, &call->signature, call->data, call->output);
  Py_END_ALLOW_THREADS;
  return op;
}

/* A rank that needs nobody's call cannot be asked later where it was, as it has gone on by then. */
int run_in_steps(Binding *binding, const plain_call *call, const fl_signature *shown, fl_op **op,
                 recorded *made) {
  static const fl_site not_known = {""};
  PyObject *place = NULL;
  const fl_site *site = NULL;
  if (binding->begin == NULL) return 0;
  if (plain_needs_nobody(call, binding->rank)) {
    site = &not_known;
    const int is_soon = is_hurried(binding, binding->calls->written, fl_ticks());
    if (!is_soon && !place_and_site(binding, &place, &site)) return 0;
  }
  if (!binding->begin(binding->group, &call->signature, call->data, call->seconds, site)) return 0;
  *made = record(binding, shown, -1, 0, place);
  binding->calls->callers[0] = PyThread_get_thread_ident();
  *op = finish_collective(binding, call, made->row);
  binding->calls->callers[0] = 0;
  return 1;
}

/* This thread is in a call from now on, in a place that leave() is to be given; -1 with an exception. */
static int enter(const Binding *binding) {
  const unsigned long thread = PyThread_get_thread_ident();
  for (int i = 1; i < CALLERS; ++i) {
    if (binding->calls->callers[i] != 0) continue;
    binding->calls->callers[i] = thread;
    return i;
  }
  PyObject *number = PyLong_FromUnsignedLong(thread);
  const int is_added = number != NULL && PySet_Add(binding->inside, number) == 0;
  Py_XDECREF(number);
  return is_added ? CALLERS : -1;
}

static void leave(const Binding *binding, int place) {
  if (place < CALLERS) {
    binding->calls->callers[place] = 0;
    return;
  }
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyObject *number = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
  if (number == NULL || PySet_Discard(binding->inside, number) < 0) PyErr_Clear();
  Py_XDECREF(number);
  PyErr_Restore(type, value, trace);
}

int run_at_once(Binding *binding, const plain_call *call, const fl_signature *shown, fl_op **op,
                recorded *made) {
  PyObject *place;
  const fl_site *site;
  const int entered = place_and_site(binding, &place, &site) ? enter(binding) : -1;
  if (entered < 0) return 0;
  *made = record(binding, shown, call->peer, 0, place);
  Py_BEGIN_ALLOW_THREADS;
  *op = binding->run(binding->group, &call->signature, call->data, call->output, call->peer, call->seconds, 0,
                     site);
  Py_END_ALLOW_THREADS;
  leave(binding, entered);
  return 1;
}

PyObject *run_collective(Binding *binding, PyObject *x, PyObject *out, plain_call *call) {
  fl_op *op;
  recorded made;
  if (is_alone(binding)) {
    made = record_alone(binding, &call->signature);
    run_alone(call);
    return end(binding, NULL, x, out, call, made);
  }
  const int has_run = binding->begin != NULL
                          ? run_in_steps(binding, call, &call->signature, &op, &made)
                          : run_at_once(binding, call, &call->signature, &op, &made);
  if (has_run) return end(binding, op, x, out, call, made);
  Py_XDECREF(call->result);
  if (PyErr_Occurred() != NULL) return NULL;
  Py_RETURN_NOTIMPLEMENTED;
}

void fill_message(fl_message *message, const plain_call *call, const fl_site *site) {
  message->signature = call->signature;
  message->data = call->data;
  message->peer = call->peer;
  message->site = *site;
  message->match = NULL;
}

/* Messages on this thread, to their end. Where the peers are quick the GIL is kept: then no signal handler
   runs, so that this thread is in no call as far as others can see. 0 with an exception. */
static int exchange(const Binding *binding, const fl_message *messages, int count, fl_op **ops) {
  const fl_signature *s = &messages[0].signature;
  const int is_small = s->count * s->itemsize <= SMALL_BYTES;
  void *posted = NULL;
  for (int i = 0; i < count; ++i) ops[i] = NULL;
  if (binding->post != NULL) {
    posted = binding->post(binding->group, messages, count, binding->seconds,
                           is_small ? SPINS_FOR_MESSAGES : -1);
    if (posted == NULL) return 1;
  }
  const int entered = enter(binding);
  Py_BEGIN_ALLOW_THREADS;
  if (posted != NULL) {
    binding->deliver(posted, ops);
  } else if (entered >= 0) {
    binding->exchange(binding->group, messages, count, binding->seconds, 0, ops);
  }
  Py_END_ALLOW_THREADS;
  if (entered >= 0) {
    leave(binding, entered);
    return 1;
  }
  for (int i = 0; i < count; ++i) {
    if (ops[i] != NULL) binding->free(ops[i]);
  }
  return 0;
}

/* A send or a receive, which may have to find out who sends, or how many rows. */
static PyObject *run_message(Binding *binding, PyObject *x, PyObject *out, plain_call *call) {
  PyObject *place;
  const fl_site *site;
  if (!place_and_site(binding, &place, &site)) {
    Py_XDECREF(call->result);
    return NULL;
  }
  const recorded made = record(binding, &call->signature, call->peer, 0, place);
  fl_message message;
  fl_op *op;
  fill_message(&message, call, site);
  message.match = call->output;
  if (!exchange(binding, &message, 1, &op)) {
    Py_XDECREF(call->result);
    ring_end(made.row, made.id, 1);
    return NULL;
  }
  PyObject *y = end(binding, op, x, out, call, made);
  if (y == NULL || call->output == NULL) return y;
  PyObject *found = plain_matched(y, &call->match);
  Py_DECREF(y);
  return found;
}

PyObject *work_for(const Binding *binding, fl_op *op, const started_op *one, PyObject *x, PyObject *out,
                   PyObject *result, PyObject *room) {
  PyObject *work = PyObject_CallFunction(
      binding->started, "KiOOOOiiKK", (unsigned long long)(uintptr_t)op, (int)one->verb, x, out, result, room,
      (int)one->root, (int)one->peer, (unsigned long long)one->id,
      (unsigned long long)one->number);
  if (work == NULL && op != NULL) {
    PyObject *const used[] = {x, out, result, room};
    for (int i = 0; i < 4; ++i) Py_INCREF(used[i]);
  }
  return work;
}

/* What the library reads or writes later, as an object; None where there is nothing. */
static PyObject *kept_room(plain_call *call) {
  const size_t bytes = call->output == &call->room    ? sizeof call->room
                       : call->output == &call->match ? sizeof call->match
                                                      : 0;
  if (bytes == 0) Py_RETURN_NONE;
  PyObject *room = PyBytes_FromStringAndSize(call->output, (Py_ssize_t)bytes);
  if (room != NULL) call->output = PyBytes_AsString(room);
  return room;
}

started_op start_one(Binding *binding, const plain_call *call, PyObject *place, const fl_site *site) {
  const fl_signature *s = &call->signature;
  recorded made;
  fl_op *op = NULL;
  if (is_alone(binding)) {
    made = record_alone(binding, s);
    made.row->flags |= RING_ASYNC;
    run_alone(call);
  } else {
    made = record(binding, s, call->peer, RING_ASYNC, place);
    Py_BEGIN_ALLOW_THREADS;
    op = binding->run(binding->group, s, call->data, call->output, call->peer, binding->seconds, 1, site);
    Py_END_ALLOW_THREADS;
  }
  if (op == NULL) {
    ring_end(made.row, made.id, 0);
  } else {
    binding->stamp(op, &made.row->ended, -(int64_t)made.id);
  }
  return (started_op){op, made.id, binding->calls->number, s->verb, s->root, call->peer};
}

/* Through `run` without waiting: a Work, in which everything lives that the operation uses. */
static PyObject *start(PyObject *self, PyObject *x, PyObject *out, plain_call *call) {
  Binding *binding = binding_of(self);
  const fl_signature *s = &call->signature;
  PyObject *place = NULL, *room = kept_room(call);
  const fl_site *site;
  if (room == NULL || (!is_alone(binding) && !place_and_site(binding, &place, &site))) {
    Py_XDECREF(call->result);
    Py_XDECREF(room);
    return NULL;
  }
  const started_op one = start_one(binding, call, place, site);
  PyObject *result = call->result == NULL ? Py_None : call->result, *work = NULL;
  const int makes_result = s->verb == FL_GATHER || s->verb == FL_ALL_GATHER || s->verb == FL_SCATTER;
  if (one.op != NULL && makes_result) {
    work = work_for(binding, one.op, &one, x, out, result, room);
  } else {
    PyObject *kept = PyTuple_Pack(3, x, out, room);
    if (kept != NULL) work = make_work(self, &one, 0, result, kept);
    Py_XDECREF(kept);
  }
  Py_XDECREF(call->result);
  Py_DECREF(room);
  return work;
}

/* Whether it is an all_to_all of unequal parts: there are other verbs of rows, which Python does. */
static int has_rows(PyObject *const *args) {
  int overflow;
  return (PyList_CheckExact(args[3]) || PyTuple_CheckExact(args[3])) && PyLong_Check(args[0]) &&
         PyLong_AsLongAndOverflow(args[0], &overflow) == FL_ALL_TO_ALL;
}

enum { MOST_ARGUMENTS = 9 };

/* A call of a number: the result is one of its kind. */
static PyObject *call_number(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  PyObject *given[MOST_ARGUMENTS], *array = plain_of_number(args[1]);
  if (array == NULL) return NULL;
  memcpy(given, args, (size_t)count * sizeof *given);
  given[1] = array;
  PyObject *result = native_call(self, given, count);
  if (result == array) {
    Py_DECREF(result);
    result = plain_number_of((PyArrayObject *)array, args[1]);
  }
  Py_DECREF(array);
  return result;
}

/* native(verb, x, out, op, scale, root or peer, tag, async_op): the result, or a Work; NotImplemented,
   and nothing has happened, where Python must do it. A ninth argument, `seconds`, is what a collective
   that blocks may take. In the place of `op` an all_to_all may have `rows`, a
   list or a tuple, which no operation is, and a receive `partial`. In the place of `out` an all_reduce of
   a list has a number: see native_several. */
PyObject *native_call(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Binding *binding = binding_of(self);
  plain_call call;
  if (binding == NULL) return NULL;
  if (count != MOST_ARGUMENTS - 1 && count != MOST_ARGUMENTS) {
    PyErr_SetString(PyExc_TypeError,
                    "expected (verb, x, out, op, scale, root or peer, tag, async_op[, seconds])");
    return NULL;
  }
  const double seconds = count == MOST_ARGUMENTS ? PyFloat_AsDouble(args[8]) : binding->seconds;
  if (seconds == -1.0 && PyErr_Occurred()) return NULL;
  if (is_left_to_python(binding)) Py_RETURN_NOTIMPLEMENTED;
  if (args[7] == Py_False && plain_has_number(args)) return call_number(self, args, count);
  const int is_async = PyObject_IsTrue(args[7]);
  const int inside = is_inside(binding);
  if (is_async < 0 || inside < 0) return NULL;
  if (!inside && PyLong_CheckExact(args[2]) && PyLong_Check(args[0]) && PyLong_AsLong(args[0]) == FL_ALL_REDUCE) {
    return native_several(self, args, is_async);
  }
  if (!inside && !is_async && has_rows(args)) {
    return native_uneven(binding, args[1], args[2], args[3]);
  }
  const int plain = inside ? 0 : plain_read(args, binding->rank, binding->size, &call);
  if (plain < 0) return NULL;
  if (plain && is_alone(binding) && !can_run_alone(&call, args[2])) {
    Py_XDECREF(call.result);
    Py_RETURN_NOTIMPLEMENTED;
  }
  if (!plain) Py_RETURN_NOTIMPLEMENTED;
  PyObject *x = args[1], *out = args[2];
  call.seconds = seconds;
  const int is_one = is_message(call.signature.verb);
  if (is_one) { /* a blocking send has no result */
    call.result = call.signature.verb == FL_SEND && !is_async ? Py_None : x;
    Py_INCREF(call.result);
  }
  if (is_async) return start(self, x, out, &call);
  if (is_one) return run_message(binding, x, out, &call);
  return run_collective(binding, x, out, &call);
}

/* native_barrier(): None, or NotImplemented. */
PyObject *native_barrier(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Binding *binding = binding_of(self);
  (void)args;
  if (binding == NULL) return NULL;
  if (count != 0) {
    PyErr_SetString(PyExc_TypeError, "expected no arguments");
    return NULL;
  }
  const int inside = is_left_to_python(binding) ? 1 : is_inside(binding);
  if (inside < 0) return NULL;
  if (inside) Py_RETURN_NOTIMPLEMENTED;
  plain_call call;
  plain_barrier(&call);
  call.seconds = binding->seconds;
  return run_collective(binding, Py_None, Py_None, &call);
}

/* native_sendrecv(x, dst, out, src, tag, recv_tag): out, or NotImplemented, where a rank that is None is nobody;
   native_sendrecv(ops): the Work of all of them. */
PyObject *native_sendrecv(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Binding *binding = binding_of(self);
  plain_call sent, received;
  if (binding == NULL) return NULL;
  if (count != 6 && count != 1) {
    PyErr_SetString(PyExc_TypeError, "expected (x, dst, out, src, tag, recv_tag), or (ops)");
    return NULL;
  }
  if (is_left_to_python(binding) || is_alone(binding)) Py_RETURN_NOTIMPLEMENTED;
  const int inside = is_inside(binding);
  if (inside < 0) return NULL;
  if (count == 1 && !inside) return native_batch(self, args[0]);
  const int rank = binding->rank, size = binding->size;
  const int sends = args[1] != Py_None, receives = args[3] != Py_None, is_pair = sends && receives;
  if (inside ||
      (sends && !plain_message(FL_SEND, args[0], args[1], args[4], Py_False, rank, size, &sent)) ||
      (receives && !plain_message(FL_RECV, args[2], args[3], args[5], Py_False, rank, size, &received)) ||
      (is_pair && plain_overlap(&sent, &received))) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  if (!sends && !receives) {
    Py_INCREF(args[2]);
    return args[2];
  }
  PyObject *place;
  const fl_site *site;
  if (!place_and_site(binding, &place, &site)) return NULL;
  const plain_call *first = sends ? &sent : &received; /* as somebody waits for it */
  fl_signature shown = first->signature;
  if (is_pair) shown.verb = RING_SENDRECV;
  const recorded made = record(binding, &shown, first->peer, 0, place);
  fl_message messages[2];
  fl_op *ops[2] = {NULL, NULL};
  fill_message(&messages[0], first, site);
  if (is_pair) fill_message(&messages[1], &received, site);
  if (!exchange(binding, messages, sends + receives, ops)) {
    ring_end(made.row, made.id, 1);
    return NULL;
  }
  PyObject *result = args[2];
  if (ops[0] == NULL && ops[1] == NULL) {
    Py_INCREF(result);
  } else {
    PyObject *handles = Py_BuildValue("(KK)", (unsigned long long)(uintptr_t)ops[0],
                                      (unsigned long long)(uintptr_t)ops[1]);
    result = handles == NULL ? NULL
                             : PyObject_CallFunction(binding->ended, "OiOOOiKd", handles, RING_SENDRECV,
                                                     args[0], args[2], args[2], 0,
                                                     (unsigned long long)made.id, binding->seconds);
    Py_XDECREF(handles);
  }
  ring_end(made.row, made.id, result == NULL);
  return result;
}
