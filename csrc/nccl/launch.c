#include "launch.h"

typedef int (*record_fn)(void *event, void *stream);
typedef int (*wait_fn)(void *stream, void *event, unsigned flags);
typedef int (*group_fn)(void);
typedef int (*reduce_fn)(const void *, void *, size_t, int, int, void *, void *);
typedef int (*rooted_reduce_fn)(const void *, void *, size_t, int, int, int, void *, void *);
typedef int (*broadcast_fn)(const void *, void *, size_t, int, int, void *, void *);
typedef int (*gather_fn)(const void *, void *, size_t, int, void *, void *);
typedef int (*send_fn)(const void *, size_t, int, int, void *, void *);
typedef int (*receive_fn)(void *, size_t, int, int, void *, void *);
typedef int (*copy_fn)(unsigned long long to, unsigned long long from, size_t, void *stream);
typedef int (*graph_fn)(void *graph, void *stream);

enum { NCCL_SUCCESS = 0, NCCL_IN_PROGRESS = 7 };

static int call(const fl_launcher *l, const fl_step *s, void *comm) {
  const void *from = (const void *)s->from;
  void *to = (void *)s->to, *stream = (void *)l->stream;
  const uintptr_t function = l->functions[s->kind];
  switch (s->kind) {
    case FL_ALL_REDUCE:
    case FL_REDUCE_SCATTER:
      return ((reduce_fn)function)(from, to, s->count, s->type, s->op, comm, stream);
    case FL_REDUCE:
      return ((rooted_reduce_fn)function)(from, to, s->count, s->type, s->op, s->peer, comm, stream);
    case FL_BROADCAST:
      return ((broadcast_fn)function)(from, to, s->count, s->type, s->peer, comm, stream);
    case FL_ALL_GATHER:
      return ((gather_fn)function)(from, to, s->count, s->type, comm, stream);
    case FL_SEND:
      return ((send_fn)function)(from, s->count, s->type, s->peer, comm, stream);
    default:
      return ((receive_fn)function)(to, s->count, s->type, s->peer, comm, stream);
  }
}

static int is_failure(int status) { return status != NCCL_SUCCESS && status != NCCL_IN_PROGRESS; }

int fl_order(const fl_launcher *l, uintptr_t event, uintptr_t recorded, uintptr_t waiting) {
  const int status = ((record_fn)l->event_record)((void *)event, (void *)recorded);
  return status ? status : ((wait_fn)l->stream_wait)((void *)waiting, (void *)event, 0);
}

int fl_call(const fl_launcher *l, uintptr_t comm, int is_group, int count, const fl_step *steps) {
  int status = is_group ? ((group_fn)l->group_start)() : NCCL_SUCCESS;
  if (is_failure(status)) return status;
  for (int i = 0; i < count; ++i) {
    const int result = call(l, &steps[i], (void *)comm);
    if (!is_failure(status)) status = result;
  }
  if (!is_group) return status;
  /* End the group also after a failure, because NCCL counts nested groups. */
  const int ended = ((group_fn)l->group_end)();
  return is_failure(status) ? status : ended;
}

int fl_launch(const fl_launcher *l, uintptr_t comm, int is_group, int count, const fl_step *steps,
              uintptr_t caller, uintptr_t done, int caller_waits, int *nccl_status) {
  int status = fl_order(l, l->ready, caller, l->stream);
  if (status) return status;
  *nccl_status = fl_call(l, comm, is_group, count, steps);
  if (*nccl_status) return 0;
  if (caller_waits) return fl_order(l, done, l->stream, caller);
  return ((record_fn)l->event_record)((void *)done, (void *)l->stream);
}

int fl_replay(const fl_replayer *r, int count, const fl_copy *blocks, uintptr_t stream,
              uintptr_t done) {
  for (int i = 0; i < count; ++i) {
    const fl_copy *b = &blocks[i];
    if (!b->bytes) continue;
    const int status = ((copy_fn)r->copy)(b->target, b->source, b->bytes, (void *)stream);
    if (status) return status;
  }
  const int status = ((graph_fn)r->launch)((void *)r->graph, (void *)stream);
  if (status || !done) return status;
  return ((record_fn)r->record)((void *)done, (void *)stream);
}
