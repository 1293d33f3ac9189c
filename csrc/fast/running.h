/* Calls of plain arrays on the group's library, recorded and with their results; or in a group of one rank. */
#pragma once

#include "binding.h"

/* Of a group of one rank. A result is in its place after run_alone, of a call that can_run_alone. */
int can_run_alone(const plain_call *call, PyObject *out);
void run_alone(const plain_call *call);

/* Wait for the other ranks and do the rest of a collective that has begun. */
fl_op *finish_collective(Binding *binding, const plain_call *call, ring_call *row);
/* A collective on this thread, recorded as `shown`: in the library's two steps, 0 where it has none or other
   calls come first, or with an exception; or through its `run`, 0 with an exception. */
int run_in_steps(Binding *binding, const plain_call *call, const fl_signature *shown, fl_op **op,
                 recorded *made);
int run_at_once(Binding *binding, const plain_call *call, const fl_signature *shown, fl_op **op,
                recorded *made);
/* A collective on this thread; where there are steps, a gather that is behind other calls is left to Python. */
PyObject *run_collective(Binding *binding, PyObject *x, PyObject *out, plain_call *call);
/* A send or a receive, which may have to find out who sends, or how many rows. */
PyObject *run_message(Binding *binding, PyObject *x, PyObject *out, plain_call *call);
void fill_message(fl_message *message, const plain_call *call, const fl_site *site);
/* Messages on this thread, to their end. Where the peers are quick the GIL is kept: then no signal handler
   runs, so that this thread is in no call as far as others can see. 0 with an exception. */
int exchange(const Binding *binding, const fl_message *messages, int count, fl_op **ops);
/* Fetch or raise what became of an operation that has not simply ended well. */
PyObject *fetch(Binding *binding, fl_op *op, PyObject *x, PyObject *out, const plain_call *call,
                recorded made);

/* An operation that has been started and recorded; `op` is NULL where it has ended well. */
typedef struct {
  fl_op *op;
  uint64_t id;
  uint64_t number; /* of the group's collectives by then */
  int32_t verb, root, peer; /* `root` is the tag of a message */
} started_op;

/* Start an operation that is waited for later, on the line of `place`. */
started_op start_one(Binding *binding, const plain_call *call, PyObject *place, const fl_site *site);
