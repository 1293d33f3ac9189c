#include "launch.h"

#include "cuda.cdef.h"
#include "nccl.cdef.h"

/* The function at `address`, which has the signature of `name`. */
#define AT(name, address) ((__typeof__(&name))(address))

static int call(const fl_launcher *l, const fl_step *s, void *comm) {
  const void *from = (const void *)s->from;
  void *to = (void *)s->to, *stream = (void *)l->stream;
  const uintptr_t function = l->functions[s->kind];
  switch (s->kind) {
    case FL_ALL_REDUCE:
    case FL_REDUCE_SCATTER:
      return AT(ncclAllReduce, function)(from, to, s->count, s->type, s->op, comm, stream);
    case FL_REDUCE:
      return AT(ncclReduce, function)(from, to, s->count, s->type, s->op, s->peer, comm, stream);
    case FL_BROADCAST:
      return AT(ncclBroadcast, function)(from, to, s->count, s->type, s->peer, comm, stream);
    case FL_ALL_GATHER:
      return AT(ncclAllGather, function)(from, to, s->count, s->type, comm, stream);
    case FL_SEND:
      return AT(ncclSend, function)(from, s->count, s->type, s->peer, comm, stream);
    default:
      return AT(ncclRecv, function)(to, s->count, s->type, s->peer, comm, stream);
  }
}

static int is_failure(int status) { return status != ncclSuccess && status != ncclInProgress; }

int fl_order(const fl_launcher *l, uintptr_t event, uintptr_t recorded, uintptr_t waiting) {
  const int status = AT(cuEventRecord, l->event_record)((void *)event, (void *)recorded);
  return status ? status : AT(cuStreamWaitEvent, l->stream_wait)((void *)waiting, (void *)event, 0);
}

int fl_call(const fl_launcher *l, uintptr_t comm, int is_group, int count, const fl_step *steps) {
  int status = is_group ? AT(ncclGroupStart, l->group_start)() : ncclSuccess;
  if (is_failure(status)) return status;
  for (int i = 0; i < count; ++i) {
    const int result = call(l, &steps[i], (void *)comm);
    if (!is_failure(status)) status = result;
  }
  if (!is_group) return status;
  /* End the group also after a failure, because NCCL counts nested groups. */
  const int ended = AT(ncclGroupEnd, l->group_end)();
  return is_failure(status) ? status : ended;
}

int fl_launch(const fl_launcher *l, uintptr_t comm, int is_group, int count, const fl_step *steps,
              uintptr_t caller, uintptr_t done, int caller_waits, int *nccl_status) {
  int status = fl_order(l, l->ready, caller, l->stream);
  if (status) return status;
  *nccl_status = fl_call(l, comm, is_group, count, steps);
  if (*nccl_status) return 0;
  if (caller_waits) return fl_order(l, done, l->stream, caller);
  return AT(cuEventRecord, l->event_record)((void *)done, (void *)l->stream);
}

int fl_replay(const fl_replayer *r, int count, const fl_copy *blocks, uintptr_t stream,
              uintptr_t done) {
  for (int i = 0; i < count; ++i) {
    const fl_copy *b = &blocks[i];
    if (!b->bytes) continue;
    const int status = AT(cuMemcpyDtoDAsync_v2, r->copy)(b->target, b->source, b->bytes, (void *)stream);
    if (status) return status;
  }
  const int status = AT(cuGraphLaunch, r->launch)((void *)r->graph, (void *)stream);
  if (status || !done) return status;
  return AT(cuEventRecord, r->record)((void *)done, (void *)stream);
}
