/* What the native functions of one group share: the library, the flight record, and the line of user code. */
#pragma once

#include "plain.h"
#include "ring.h"

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

/* Functions of a native library, as the addresses that `bind` is given. */
typedef struct {
  fl_op *(*run)(void *group, const fl_signature *, void *data, void *output, int peer, double seconds,
                int async, const fl_site *); /* NULL: the group has one rank, and no library */
  void (*exchange)(void *group, const fl_message *, int count, double seconds, int async, fl_op **results);
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
} native_library;

/* Objects that are kept by the function's `self`, a tuple that begins with the capsule of this: the collector
   of cycles sees into that. */
typedef struct {
  void *group;
  int rank, size;
  double seconds;
  long long packed_bytes[2]; /* all_reduce_multiple packs arrays up to this; if asynchronous */
  native_library library;
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
  PyObject *first;   /* a list: while it has anything in it, calls are left to Python */
  PyObject *dropped; /* the same; of all groups, and any container */
  known_site sites[SITES];
  known_code codes[CODES];
} Binding;

/* A call that was recorded. */
typedef struct {
  ring_call *row;
  uint64_t id;
} recorded;

/* The name of the verb that this thread calls, if no function of ours in Python does: see entry.c. */
extern _Thread_local PyObject *called_verb;

static inline Binding *binding_of(PyObject *self) {
  return PyCapsule_GetPointer(PyTuple_GetItem(self, 0), NULL);
}
static inline int is_alone(const Binding *binding) { return binding->library.run == NULL; }

/* Whether a call is left to Python: something must be done first that only Python does, or it wants every call,
   or this thread is in the middle of a call and runs a signal handler; -1: an exception. */
int is_left_to_python(const Binding *binding);
/* This thread is in a call from now on, in a place that leave() is to be given; -1 with an exception. */
int enter(const Binding *binding);
void leave(const Binding *binding, int place);

/* Record a call; `place`: its line if known. */
recorded record(const Binding *binding, const fl_signature *signature, int peer, int flags,
                PyObject *place);
/* Record it on its line, if that is worth the time. */
recorded record_alone(Binding *binding, const fl_signature *shown);
/* Note which line this call is on; takes some 200 ns, and nothing is raised. */
void note_place(Binding *binding, ring_call *row);
/* Whether it is not worth the 200 ns to note where a call is: one soon after another, but for the first. */
int is_hurried(const Binding *binding, uint64_t before, int64_t now);

/* Of the caller, of which `place` is borrowed: (code, instruction, name of our function that it called), and its
   site; 0 with an exception. */
int place_and_site(Binding *binding, PyObject **place, const fl_site **site);

int binding_names(void);
