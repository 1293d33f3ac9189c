/* The last calls of the native all_reduce, in memory that Python has made and reads: see
   flashlight_py/distributed/recorder/fast_calls.py. Writing one takes some 25 ns; the caller holds
   the GIL. Needs csrc/common/types.cdef.h. */
#pragma once

#include <stdint.h>
#include <time.h>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

enum { RING_CALLS = 256, RING_FAILED = 1, RING_PLACED = 2 };

/* One cache line. Times are those of ring_ticks(); ended is 0 while the call runs. */
typedef struct {
  uint64_t number; /* of the group's calls, those through Python included */
  int64_t started;
  int64_t ended;
  int64_t count;
  int64_t shape[3]; /* the first three dimensions */
  int8_t dtype;
  int8_t op;
  int8_t ndim;
  int8_t flags; /* RING_FAILED, RING_PLACED */
  int32_t unused;
} ring_call;

typedef struct {
  uint64_t number;  /* calls of the group so far; Python counts here as well */
  uint64_t written; /* calls in this ring so far */
  uint64_t off;     /* not 0: leave every call to Python */
  uint64_t caller;  /* the thread that is in the native all_reduce, as Python knows it; or 0 */
  uint64_t unused[4];
  ring_call calls[RING_CALLS];
} ring;

static inline int64_t ring_nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* The processor's own counter where there is one: the system's clock takes 25 ns. */
static inline int64_t ring_ticks(void) {
#if defined(__x86_64__)
  return (int64_t)__rdtsc();
#elif defined(__aarch64__)
  int64_t ticks;
  __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
#else
  return ring_nanoseconds();
#endif
}

static inline ring_call *ring_begin(ring *r, const fl_signature *signature) {
  ring_call *call = &r->calls[r->written++ % RING_CALLS];
  call->number = ++r->number;
  call->started = ring_ticks();
  call->ended = 0;
  call->count = signature->count;
  for (int d = 0; d < 3; ++d) call->shape[d] = signature->shape[d];
  call->dtype = (int8_t)signature->dtype;
  call->op = (int8_t)signature->op;
  call->ndim = (int8_t)signature->ndim;
  call->flags = 0;
  return call;
}

/* Threads that call one group at once may have overwritten the entry by now. */
static inline void ring_end(ring_call *call, uint64_t number, int failed) {
  if (call->number != number) return;
  if (failed) call->flags |= RING_FAILED;
  call->ended = ring_ticks();
}
