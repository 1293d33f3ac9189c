/* Calls, and operations that can be waited for, of both native backends. Needs codes.cdef.h.

   CFFI reads these files and the compiler includes them, so they cannot differ. No exception crosses this
   ABI. On failure, functions that create an object return NULL and functions that return an int return -1,
   unless documented otherwise; fl_error() then returns the message. */

/* The call of a rank. It travels ahead of the payload and must be equal on all ranks, with these exceptions.
   The first dimension may differ in all_gather, gather and all_to_all_uneven. In scatter and broadcast, only
   the root must give type and shape; on other ranks ndim may be FL_ANY, in a broadcast only if all ranks set
   part_of, which tells the root that they do not know the size. A rank with invalid arguments joins
   with a barrier, send or recv whose ndim is FL_REFUSED: that call equals no other call, and its site
   contains the reason. If a rank raises the mismatch of an earlier call, the library replaces its call by a
   barrier with ndim FL_WITHDRAWN and the verb as op. A comparison-only call (FL_COMPARED) has no data and
   itemsize 0; another library moves the data. If shapes may differ in a collective, its handle has the
   signature of every rank. */
typedef struct {
  uint64_t sequence; /* number of this call in the group, from 1; set by the library */
  int32_t verb;      /* fl_verb */
  int32_t dtype;     /* fl_dtype plus FL_ON_GPU and FL_COMPARED. FL_MOVED: any other dtype. With FL_MOVED, or
                        if the array is reduced as another dtype, `shape` ends with a dtype's digest */
  int32_t op;        /* fl_reduce_op */
  int32_t root;      /* root rank; send, recv: tag; reduce_scatter_uneven: digest of the parts' sizes */
  double scale;
  int64_t count;     /* elements */
  int32_t itemsize;  /* bytes */
  int32_t ndim;
  int64_t shape[FL_DIMENSIONS]; /* with more dimensions, the last entry is a hash of the remaining ones */
  int64_t part_of;   /* number, 1 to 31, of the composed operation whose step this call is; 0: no step */
} fl_signature;

/* Data of the uneven verbs: this rank's adjacent sections, and the sizes of the sections between all ranks:
   bytes[source * ranks + destination], equal on every rank. */
typedef struct {
  const void *data;
  const int64_t *bytes;
} fl_sections;

/* Output buffer of all_gather and gather. It is filled if its size equals the number of received bytes. */
typedef struct {
  void *data;
  size_t bytes;
} fl_room;

/* Call site in the user's program, such as "folder/file.py:12", or the reason why the call was rejected. Only
   the end of a long text is kept. Zero-terminated; empty: unknown. */
typedef struct {
  char text[FL_SITE_BYTES];
} fl_site;

/* Output of a receive that does not know its source (peer -1) or its number of rows. Receives are matched in
   the order of their calls, also those from any rank. If messages of several ranks have arrived, the receives
   from any rank take them from one rank after the other. */
typedef struct {
  int32_t source;  /* result: source rank; -1: no message in time */
  int32_t partial; /* nonzero: the first dimension may be shorter than in the signature */
  int64_t rows;    /* result: first dimension of the received array */
  double patience; /* seconds after which the receive succeeds without a message; negative: no limit */
  int32_t *claim;  /* NULL, or a flag that several receives share, also of several groups. Only one of them
                      takes a message, and sets the flag from 0 to 1. The others end with source -1. */
} fl_match;

/* A send or receive; the signature's root is the tag. */
typedef struct {
  fl_signature signature;
  void *data;
  int peer;
  fl_site site;
  fl_match *match; /* for receives that need it; else NULL */
} fl_message;

/* Return the message of the last failed function on this thread. */
const char *fl_error(void);

typedef struct fl_op fl_op;

/* Wait up to `seconds` for the operation to end. Return its status, or FL_PENDING if it has not ended. */
fl_status fl_op_wait(fl_op *op, double seconds);
/* Return the end time in seconds of CLOCK_MONOTONIC; 0 while the operation runs. */
double fl_op_ended(fl_op *op);
/* Write the end time, in ticks (ticks.h), into *ended when the operation ends, if *ended still equals
   `running`. *ended must live as long as the group. */
void fl_op_stamp(fl_op *op, int64_t *ended, int64_t running);
const char *fl_op_message(fl_op *op);
/* Write the ranks that the failure concerns; return their number. */
int fl_op_missing(fl_op *op, int *ranks, int capacity);
/* Return the signatures by rank; sequence 0: not received. After FL_TIMEOUT: each rank's last known call. */
const fl_signature *fl_op_signatures(fl_op *op);
/* Return the call site of the signature of `rank`; empty: unknown. */
const char *fl_op_site(fl_op *op, int rank);
/* After FL_MISMATCH: return the number of calls since the call that differs; 0: this call. */
int fl_op_calls_ago(fl_op *op);
/* Return the approximate seconds between the call of `rank` and the failure; -1: unknown. */
double fl_op_age(fl_op *op, int rank);
/* Return the data received by all_gather or gather without a fitting fl_room, by scatter without output, or
   by broadcast with FL_ANY. The data lives as long as the handle. */
void *fl_op_output(fl_op *op, size_t *bytes);
/* End an unmatched receive with source -1. No effect on other operations. */
int fl_op_cancel(fl_op *op);
/* Wait up to `seconds` until one of the receives that share `claim` has a message. */
void fl_claim_wait(int32_t *claim, double seconds);
/* Free the handle. A running operation continues. */
void fl_op_free(fl_op *op);

/* Reduce `ranks` arrays in rank order into `into`, which may be one of them. Return 0 if `op` does not
   support `dtype`. See csrc/reduce/reduce.h. */
int fl_reduce(int dtype, int op, double scale, void *into, const void *const *from, int ranks, size_t count);

/* A group of processes in a library: see group.cdef.h. */
typedef struct fl_group fl_group;
