/* The flight record of a group: its last calls, in memory that Python allocates and reads (journal.py). To
   write an entry takes some 25 ns. The caller holds the GIL. Needs csrc/common/types.cdef.h. */
#pragma once

#include <stdint.h>

#include "../common/ticks.h"

/* Times are in ticks of fl_ticks(). */
typedef struct {
  uint64_t number; /* number among the group's collectives; 0: a message */
  int64_t started;
  int64_t ended; /* the negative id while the call runs: see fl_stamp */
  int64_t bytes;
  int64_t shape[3]; /* the first three dimensions */
  int8_t verb;      /* fl_verb, or FL_SENDRECV */
  int8_t dtype;
  int8_t op;
  int8_t ndim;
  int32_t flags;
  int32_t peer; /* peer of a message (-1: any), or root of a collective */
  int32_t tag;
  uint64_t id; /* number of the call among this process's calls in the group, from 1; 0: empty entry */
} ring_call;

typedef struct {
  uint64_t number;     /* collectives of the group so far */
  uint64_t written;    /* calls so far; id of the last call */
  uint64_t off;        /* nonzero: Python handles every call */
  uint64_t callers[5]; /* Python's ids of threads inside a call, or 0; slot 0: the thread in a collective */
  ring_call calls[FL_RECORDED_CALLS];
} ring;

static inline int is_message(int verb) { return verb == FL_SEND || verb == FL_RECV || verb == FL_SENDRECV; }

static inline ring_call *ring_begin(ring *r, const fl_signature *signature, int peer, int flags) {
  const int is_one = is_message(signature->verb);
  ring_call *call = &r->calls[r->written++ % FL_RECORDED_CALLS];
  call->id = r->written;
  call->number = is_one ? 0 : ++r->number;
  __atomic_store_n(&call->ended, -(int64_t)call->id, __ATOMIC_RELAXED);
  call->started = fl_ticks();
  call->bytes = signature->count * signature->itemsize;
  for (int d = 0; d < 3; ++d) call->shape[d] = signature->shape[d];
  call->verb = (int8_t)signature->verb;
  call->dtype = (int8_t)signature->dtype;
  call->op = (int8_t)signature->op;
  call->ndim = (int8_t)signature->ndim;
  call->flags = flags;
  call->peer = is_one ? peer : signature->root;
  call->tag = is_one ? signature->root : 0;
  return call;
}

/* Record the end of a call, unless concurrent calls of the group have overwritten the entry. */
static inline void ring_end(ring_call *call, uint64_t id, int failed) {
  if (failed && call->id == id) call->flags |= FL_RECORDED_FAILED;
  fl_stamp(&call->ended, -(int64_t)id);
}
