/* The C ABI between Python and Gloo. CFFI reads this file, the compiler includes it: no drift.

   Nothing throws or aborts across it: every failure is a status and a message. Calls that start
   an operation return at once; the group's worker thread runs them in the order they came. */

typedef enum {
  FL_OK = 0,
  FL_PENDING = 1,     /* not finished yet */
  FL_MISMATCH = 2,    /* ranks called different things; nothing was changed, the group lives on */
  FL_PEER_LOST = 3,   /* a connection broke: see the missing ranks */
  FL_TIMEOUT = 4,     /* the missing ranks did not join in time */
  FL_CLOSED = 5,      /* the group was closed, or broke in an earlier operation */
  FL_FAILED = 6,      /* anything else; the message says what */
} fl_status;

typedef enum {
  FL_ALL_REDUCE = 1,
  FL_REDUCE_SCATTER = 2,
  FL_BROADCAST = 3,
  FL_ALL_GATHER = 4,
  FL_BARRIER = 5,
  FL_SEND = 6,
  FL_RECV = 7,
} fl_verb;

/* What a rank calls. Every rank's travels ahead of the payload and must equal every other's;
   all_gather alone lets the first dimension differ. */
typedef struct {
  uint64_t sequence; /* calls of this group so far, this one included; filled in by the library */
  int32_t verb;      /* fl_verb */
  int32_t dtype;     /* fl_dtype */
  int32_t op;        /* fl_reduce_op */
  int32_t root;      /* root rank, or the tag of send and recv */
  double scale;
  int64_t count;     /* elements */
  int32_t itemsize;  /* bytes */
  int32_t ndim;
  int64_t shape[8];  /* the first eight dimensions */
} fl_signature;

typedef struct fl_group fl_group;
typedef struct fl_op fl_op;

/* A group of `size` processes whose sockets are bound to `host` (a name or address) or, when
   `host` is empty, to the network interface `interface`. `seconds` bounds the connecting.
   NULL with a message on failure. */
fl_group *fl_gloo_create(int rank, int size, const char *host, const char *interface,
                         double seconds, char *message, size_t message_bytes);

/* Write the address that `peer` must connect to; returns its bytes, or -1 where the room is too
   small. All addresses of a group have the same number of bytes. */
int fl_gloo_address(fl_group *group, int peer, char *address, size_t address_bytes);

/* The calls below start an operation and return at once; never NULL. `seconds` bounds the
   operation's time from when it begins to run. `data` and `output` must stay alive and untouched
   until it has ended. */

/* Connect to every peer: `addresses` holds, in rank order, what each rank gave for this one. */
fl_op *fl_gloo_connect(fl_group *group, const char *addresses, size_t address_bytes,
                       double seconds);

/* all_reduce, broadcast: in place on data.      barrier: data is NULL.
   reduce_scatter: data has signature.count elements in all, output takes this rank's part.
   all_gather: the ranks' data, one after the other, are given by fl_op_output.
   send, recv: data, to and from `peer`. */
fl_op *fl_gloo_run(fl_group *group, const fl_signature *signature, void *data, void *output,
                   int peer, double seconds);

/* Wait up to `seconds` for the operation to end. FL_PENDING when it has not. */
fl_status fl_op_wait(fl_op *op, double seconds);
const char *fl_op_message(fl_op *op);
/* Write which ranks the failure is about; returns how many. */
int fl_op_missing(fl_op *op, int *ranks, int capacity);
/* What each rank called, of those whose signature arrived (the others have sequence 0). */
const fl_signature *fl_op_signatures(fl_op *op);
/* What all_gather received; lives as long as the handle. */
void *fl_op_output(fl_op *op, size_t *bytes);
/* Free the handle. An operation that has not ended goes on. */
void fl_op_free(fl_op *op);

/* Stop the running operation, fail the queued ones, close the sockets, free the group. */
void fl_gloo_close(fl_group *group);

/* Combine `ranks` arrays in rank order into `into`, which may be one of them; 0 where dtype and
   op do not go together. See csrc/reduce/reduce.h. */
int fl_reduce(int dtype, int op, double scale, void *into, const void *const *from, int ranks,
              size_t count);
