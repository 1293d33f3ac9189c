/* State shared by the native functions of a group: library, flight record, and the caller's line. */
#pragma once

#include "plain.h"
#include "ring.h"

enum { SITES = 64, CODES = 16 };

/* A call site, cached by code and instruction, because a look-up takes microseconds. */
typedef struct {
  PyObject *place; /* line for the flight record, or NULL */
  PyObject *code;  /* code object that contains the line */
  long instruction;
  const fl_site *site;
} cached_site;

/* A code object, and whether it belongs to the package. */
typedef struct {
  PyObject *code; /* NULL: empty entry */
  int is_ours;
} cached_code;

/* Functions of a native library, from the addresses passed to bind(). */
typedef struct {
  fl_op *(*run)(void *group, const fl_signature *, void *data, void *output, int peer, double seconds,
                int async, const fl_site *); /* NULL: the group has one rank and no library */
  void (*exchange)(void *group, const fl_message *, int count, double seconds, int async, fl_op **results);
  void (*stamp)(fl_op *, int64_t *, int64_t);
  fl_status (*wait)(fl_op *, double);
  const fl_signature *(*signatures)(fl_op *);
  void *(*output)(fl_op *, size_t *);
  void (*free)(fl_op *);
  /* Collectives: steps begin, ready, finish. Messages: steps post, deliver. NULL outside shared memory. */
  int (*begin)(void *, const fl_signature *, const void *, double, const fl_site *);
  int (*ready)(void *, int);
  fl_op *(*finish)(void *, const fl_signature *, void *, void *);
  void *(*post)(void *, const fl_message *, int, double, int);
  void (*deliver)(void *, fl_op **);
} native_library;

/* The native functions of a group share this struct. Their `self` is a tuple: a capsule with the struct, and
   the arguments of bind(), which keep the objects below alive. The garbage collector traverses the tuple. */
typedef struct Binding {
  void *group;
  int rank, size;
  double seconds;
  long long packed_bytes[2]; /* maximum bytes of an array to pack: blocking, asynchronous */
  const int64_t *most;    /* in a group over several hosts: for each verb, maximum bytes of a collective; else NULL */
  struct Binding *inside; /* in such a group: the group of this host's ranks, which sends their messages; or NULL */
  const int32_t *ranks;   /* in the group `inside`: for each rank of the outer group its rank here, or -1; else NULL */
  native_library library;
  PyObject *ended;         /* called with an ended operation: raises its error or fetches its result */
  PyObject *started;       /* called with a running operation; returns the Work */
  PyObject *together;      /* combines a list of Works into one */
  PyObject *forked;        /* called for a Work from before a fork, with its verb's code; raises */
  PyObject *work;          /* type of light Works: see works.c */
  PyObject *running;       /* dict; its keys are Works that may not have ended */
  Py_ssize_t most_running; /* size of `running` at which it is next cleaned */
  PyObject *here;          /* returns the address of the fl_site of user code */
  PyObject *memory;        /* array with the ring */
  ring *calls;
  PyObject *notes;   /* list: for each entry of the ring, the line of user code or None */
  PyObject *folders; /* tuple of folders whose code is not user code */
  PyObject *threads; /* set: ids of threads inside a call for which `callers` of ring.h has no space */
  PyObject *first;   /* list: shared arrays that Python must free before the group's next call */
  PyObject *dropped; /* container: lost groups that Python must close before any group's next call */
  cached_site sites[SITES];
  cached_code codes[CODES];
} Binding;

typedef struct {
  ring_call *row;
  uint64_t id;
} recorded;

/* Name of the verb that this thread has called through entry.c, without a Python function; else NULL. */
extern _Thread_local PyObject *called_verb;

static inline Binding *binding_of(PyObject *self) {
  return PyCapsule_GetPointer(PyTuple_GetItem(self, 0), NULL);
}
/* Return 1 if the group's library runs blocking collectives of `bytes` bytes. */
static inline int runs_here(const Binding *binding, int verb, int64_t bytes) {
  return binding->most == NULL || bytes <= binding->most[verb];
}
/* Return the group for messages to or from `peer` (-1: any rank); NULL: Python handles them. */
static inline Binding *part_for(Binding *binding, int peer) {
  Binding *inside = binding->inside;
  if (binding->most == NULL) return binding;
  if (peer < 0) return NULL;
  if (inside == NULL || inside->ranks[peer] < 0) return binding;
  return PyList_Size(inside->first) == 0 ? inside : NULL;
}
/* Return the rank in `part` of the outer group's rank `peer` (-1: any rank). */
static inline int number_in(const Binding *part, int peer) {
  return part->ranks == NULL || peer < 0 ? peer : part->ranks[peer];
}
static inline int is_alone(const Binding *binding) { return binding->library.run == NULL; }

/* Return 1 if Python must handle the call: Python has other work to do first or has requested every call, or
   this thread is in a signal handler that interrupted a call. -1: an exception. */
int is_left_to_python(const Binding *binding);
/* Mark this thread as inside a call. Return the slot to pass to leave(), or -1 with an exception. */
int enter(const Binding *binding);
void leave(const Binding *binding, int place);

/* Record a call; `place` is its line, or NULL. */
recorded record(const Binding *binding, const fl_signature *signature, int peer, int flags, PyObject *place);
/* Record a call with its line, unless is_hurried(). */
recorded record_alone(Binding *binding, const fl_signature *shown);
/* Add the line of the current call to `row`. Takes some 200 ns and raises no exception. */
void note_place(Binding *binding, ring_call *row);
/* Return 1 if the group's calls follow so quickly that recording the line, some 200 ns, is too slow.
   `before`: id of the previous call. `now`: time in ticks. */
int is_hurried(const Binding *binding, uint64_t before, int64_t now);

/* Set *place to a borrowed tuple (code, instruction, name of the called function) of the caller, and *site to
   its call site. Return 0 with an exception. */
int place_and_site(Binding *binding, PyObject **place, const fl_site **site);

int binding_names(void);
