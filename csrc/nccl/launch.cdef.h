/* An NCCL collective with the events that order it between two streams, and a CUDA graph launch with the copies
 * of its arguments.
 *
 * NCCL and CUDA driver functions are passed as addresses, so that this file is built without NCCL and CUDA. Streams,
 * events, graphs and communicators are handles. */

enum {
  FL_ALL_REDUCE,
  FL_REDUCE_SCATTER,
  FL_REDUCE,
  FL_BROADCAST,
  FL_ALL_GATHER,
  FL_SEND,
  FL_RECV,
  FL_KINDS
};

/* Arguments of one NCCL function; `peer` is the root, or the peer of a message. */
typedef struct {
  int kind;
  uintptr_t from, to;
  size_t count;
  int type, op, peer;
} fl_step;

typedef struct {
  uintptr_t event_record, stream_wait; /* cuEventRecord, cuStreamWaitEvent */
  uintptr_t group_start, group_end;
  uintptr_t functions[7];   /* NCCL functions, by kind (FL_ALL_REDUCE ...) */
  uintptr_t stream, ready;  /* the communication stream; an event */
} fl_launcher;

/* Let stream `waiting` wait for all current work of stream `recorded`. Returns a CUresult. */
int fl_order(const fl_launcher *l, uintptr_t event, uintptr_t recorded, uintptr_t waiting);

/* Call `count` functions on the communication stream. Returns an ncclResult_t. */
int fl_call(const fl_launcher *l, uintptr_t comm, int is_group, int count, const fl_step *steps);

/* Order the communication stream after the caller's stream, call the functions, and record `done`. With
 * `caller_waits`, let the caller's stream wait for `done`. Returns a CUresult; `nccl_status` is an ncclResult_t.
 * `done` is recorded only if `nccl_status` is success. */
int fl_launch(const fl_launcher *l, uintptr_t comm, int is_group, int count, const fl_step *steps,
              uintptr_t caller, uintptr_t done, int caller_waits, int *nccl_status);

typedef struct {
  uintptr_t target, source; /* on the device */
  size_t bytes;
} fl_copy;

typedef struct {
  uintptr_t copy, launch, record; /* cuMemcpyDtoDAsync_v2, cuGraphLaunch, cuEventRecord */
  uintptr_t graph;
} fl_replayer;

/* On `stream`: copy `count` blocks, launch the graph, and record `done` unless it is 0. Returns a CUresult. */
int fl_replay(const fl_replayer *r, int count, const fl_copy *blocks, uintptr_t stream,
              uintptr_t done);
