/* What the native entry of one group has. */
#pragma once

#include "plain.h"
#include "ring.h"

typedef fl_op *(*fl_run)(void *group, const fl_signature *, void *data, void *output, int peer,
                         double seconds, int async, const fl_site *);
typedef void (*fl_exchange)(void *group, const fl_message *, int count, double seconds, int async,
                            fl_op **results);

enum { SITES = 64, CODES = 16 };

/* Where a program calls, by its code and instruction: looked up once, as it takes microseconds. */
typedef struct {
  PyObject *place; /* as the flight record keeps it; or NULL */
  PyObject *code;  /* of that place */
  long instruction;
  const fl_site *site;
} known_site;

/* Code that was seen, and whether it lies in the package. */
typedef struct {
  PyObject *code; /* or NULL */
  int is_ours;
} known_code;

/* What it refers to is kept by the function's `self`, a tuple that begins with the capsule of this:
   the collector of cycles sees into that. */
typedef struct {
  void *group;
  int rank, size;
  double seconds;
  fl_run run; /* NULL: the group has one rank, and no library */
  fl_exchange exchange;
  void (*stamp)(fl_op *, int64_t *, int64_t);
  fl_status (*wait)(fl_op *, double);
  const fl_signature *(*signatures)(fl_op *);
  void *(*output)(fl_op *, size_t *);
  void (*free)(fl_op *);
  /* The two steps of a collective, and of messages, in shared memory; NULL elsewhere. */
  int (*begin)(void *, const fl_signature *, const void *, double, const fl_site *);
  int (*ready)(void *, int);
  fl_op *(*finish)(void *, const fl_signature *, void *, void *);
  void *(*post)(void *, const fl_message *, int, double, int);
  void (*deliver)(void *, fl_op **);
  PyObject *ended;   /* called with what is to be raised, or fetched */
  PyObject *started; /* called with an operation that runs; returns the Work */
  PyObject *together; /* makes one Work of a list of them */
  PyObject *forked;  /* called with a verb's code, raises: another process has started it */
  PyObject *work;    /* the type of light Works: see works.c */
  PyObject *running; /* a dictionary whose keys are Works that may not have ended */
  Py_ssize_t most_running; /* when they are looked at next */
  PyObject *here;    /* returns the address of the fl_site of user code */
  PyObject *memory;  /* an array: the ring */
  ring *calls;
  PyObject *notes;   /* a list: the line of user code of each call of the ring, or None */
  PyObject *folders; /* a tuple of those whose code is not the user's */
  PyObject *inside;  /* a set: the threads that are in another call of the group */
  PyObject *first;   /* a list of containers: while one has anything in it, calls are left to Python */
  known_site sites[SITES];
  known_code codes[CODES];
} Binding;

/* A call that was recorded. */
typedef struct {
  ring_call *row;
  uint64_t id;
} recorded;

static inline Binding *binding_of(PyObject *self) {
  return PyCapsule_GetPointer(PyTuple_GetItem(self, 0), NULL);
}
/* Whether something must be done first that only Python does, or it wants every call. */
int is_left_to_python(const Binding *binding);
/* Whether this thread is in the middle of a call: it runs a signal handler, which Python answers; -1: an
   exception. */
int is_inside(const Binding *binding);

/* Of a group of one rank. A result is in its place after run_alone, of a call that can_run_alone. */
static inline int is_alone(const Binding *binding) { return binding->run == NULL; }
int can_run_alone(const plain_call *call, PyObject *out);
void run_alone(const plain_call *call);
recorded record_alone(Binding *binding, const fl_signature *shown);

recorded record(const Binding *binding, const fl_signature *signature, int peer, int flags,
                PyObject *place);
/* Wait for the other ranks and do the rest of a collective that has begun. */
fl_op *finish_collective(Binding *binding, const plain_call *call, ring_call *row);
/* A collective on this thread, recorded as `shown`: in the library's two steps, 0 where it has none or other
   calls come first, or with an exception; or through its `run`, 0 with an exception. */
int run_in_steps(Binding *binding, const plain_call *call, const fl_signature *shown, fl_op **op,
                 recorded *made);
int run_at_once(Binding *binding, const plain_call *call, const fl_signature *shown, fl_op **op,
                recorded *made);
/* A collective on this thread; where there are steps, one that is behind others is left to Python. */
PyObject *run_collective(Binding *binding, PyObject *x, PyObject *out, plain_call *call);
/* Fetch or raise what became of an operation that has not simply ended well. */
PyObject *fetch(const Binding *binding, fl_op *op, PyObject *x, PyObject *out, const plain_call *call,
                recorded made);

PyObject *native_call(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_sendrecv(PyObject *self, PyObject *const *args, Py_ssize_t count);

PyObject *native_object(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_barrier(PyObject *self, PyObject *const *args, Py_ssize_t count);

/* all_to_all with `rows`; NotImplemented as native_call. Where `out` has not as many rows as arrive, the
   result is another array. */
PyObject *native_uneven(Binding *binding, PyObject *x, PyObject *out, PyObject *rows);

/* An operation that has been started and recorded; `op` is NULL where it has ended well. */
typedef struct {
  fl_op *op;
  uint64_t id;
  uint64_t number; /* of the group's collectives by then */
  int32_t verb, root, peer; /* `root` is the tag of a message */
} started_op;

/* Start an operation that is waited for later, on the line of `place`. */
started_op start_one(Binding *binding, const plain_call *call, PyObject *place, const fl_site *site);
/* all_reduce of the arrays of a list: the list; or NotImplemented as native_call; or a tuple of the arrays that Python
   must reduce after the others. Asynchronous: a tuple of a Work and a list, of each packed message (its array, the
   arrays that are in it). Arrays of at most as many bytes as the number in the place of `out` are packed; negative:
   none is. */
PyObject *native_several(PyObject *self, PyObject *const *args, int is_async);

/* The Work of one that Python is to look after, with all that it uses. Where a signal handler raises
   meanwhile, nobody may have what the operation still writes to: that stays for ever. */
PyObject *work_for(const Binding *binding, fl_op *op, const started_op *one, PyObject *x, PyObject *out,
                   PyObject *result, PyObject *room);
/* A light Work: of one operation (`count` is 0) with its `result`, `kept` a tuple of its array, its `out` and
   its room, of a receive the bytes of its fl_match or None; or of `count` messages, `result` the list of their
   arrays, `kept` the bytes of as many fl_match or NULL: then it takes over `ops`, which PyMem_Free frees. */
PyObject *make_work(PyObject *owner, started_op *ops, int count, PyObject *result, PyObject *kept);
PyObject *work_type(void);

/* Begin the messages of `ops`, a list of P2POp: their Work; NotImplemented as native_call. */
PyObject *native_batch(PyObject *self, PyObject *ops);
void fill_message(fl_message *message, const plain_call *call, const fl_site *site);

/* Python names of attributes. */
int place_names(void);
int batch_names(void);
int object_names(void);
/* (code, instruction, name of our function that it called), or NULL with an exception. */
PyObject *place_of_caller(Binding *binding);
/* The same and its site, of which `place` is borrowed; 0 with an exception. */
int place_and_site(Binding *binding, PyObject **place, const fl_site **site);
