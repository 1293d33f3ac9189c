/* Calls with plain arrays on the group's library, or in a group of one rank: records and results. */
#pragma once

#include "binding.h"

/* For a group of one rank. can_run_alone(): return 1 if run_alone() can compute the result. */
int can_run_alone(const plain_call *call, PyObject *out);
void run_alone(const plain_call *call);

/* Wait for the other ranks and complete a collective that has begun. */
fl_op *finish_collective(Binding *binding, const plain_call *call, ring_call *row);
/* Run a collective on this thread and record it as `shown`. run_in_steps() calls the library's steps begin()
   and finish(). It returns 0 with an exception, or if the library has no steps or other calls must run first.
   run_at_once() calls the library's run(), and returns 0 with an exception. */
int run_in_steps(Binding *binding, const plain_call *call, const fl_signature *shown, fl_op **op,
                 recorded *entry);
int run_at_once(Binding *binding, const plain_call *call, const fl_signature *shown, fl_op **op,
                recorded *entry);
/* Run a collective on this thread. In shared memory, Python handles a gather that must wait for other calls. */
PyObject *run_collective(Binding *binding, PyObject *x, PyObject *out, plain_call *call);
/* Run a send or a receive, also from any rank or of an unknown number of rows. */
PyObject *run_message(Binding *binding, PyObject *x, PyObject *out, plain_call *call);
void fill_message(const Binding *part, fl_message *message, const plain_call *call, const fl_site *site);
/* Run messages on this thread to their end. While peers respond quickly, it keeps the GIL: no signal handler
   runs then, and the thread is not marked as inside a call. Return 0 with an exception. */
int exchange(const Binding *binding, const fl_message *messages, int count, fl_op **ops);
/* Fetch the result of an operation, or raise its error. */
PyObject *fetch(Binding *binding, fl_op *op, PyObject *x, PyObject *out, const plain_call *call,
                recorded entry);

/* A started and recorded operation; `op` is NULL if it has ended well. */
typedef struct {
  const Binding *part; /* group that runs it */
  fl_op *op;
  uint64_t id;
  uint64_t number;          /* collectives of the group so far */
  int32_t verb, root, peer; /* `root` is the tag of a message */
} started_op;

/* Start an operation that was called at the line `place`. */
started_op start_one(Binding *binding, const plain_call *call, PyObject *place, const fl_site *site);
