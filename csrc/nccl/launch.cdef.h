/* One collective of NCCL, with the events that order it between two streams, in one call. And one
 * launch of a CUDA graph, with the copies of its arguments.
 *
 * The functions of NCCL and of CUDA's driver are passed as addresses, so neither is needed to build
 * this. Streams, events, graphs and communicators are handles. */

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

/* Arguments of one function of NCCL; `peer` is the root, or the other rank of a message. */
typedef struct {
  int kind;
  uintptr_t from, to;
  size_t count;
  int type, op, peer;
} fl_step;

typedef struct {
  uintptr_t event_record, stream_wait; /* cuEventRecord, cuStreamWaitEvent */
  uintptr_t group_start, group_end;
  uintptr_t functions[7];   /* by kind */
  uintptr_t stream, ready;  /* the communication stream; an event */
} fl_launcher;

/* Let `waiting` wait for all work that `recorded` has so far; returns a CUresult. */
int fl_order(const fl_launcher *l, uintptr_t event, uintptr_t recorded, uintptr_t waiting);

/* Call `count` functions on the communication stream; returns an ncclResult_t. */
int fl_call(const fl_launcher *l, uintptr_t comm, int is_group, int count, const fl_step *steps);

/* Wait for the caller's stream, call the functions, record `done`, and let the caller's stream wait
 * for it if `caller_waits`. Returns a CUresult; `nccl_status` is an ncclResult_t. `done` is not
 * recorded if that is not success. */
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

/* On `stream`: copy `count` blocks, launch the graph, record `done` unless it is 0. Returns a
 * CUresult. */
int fl_replay(const fl_replayer *r, int count, const fl_copy *blocks, uintptr_t stream,
              uintptr_t done);
