/* Calls, and operations that can be waited for, of both native backends. Needs codes.cdef.h.

   CFFI reads these files and the compiler includes them, so they cannot differ. No exception crosses this
   ABI. On failure, functions that create an object return NULL and functions that return an int return -1,
   unless documented otherwise; fl_error() then returns the message. */

/* The call of a rank. It travels ahead of the payload and must be equal on all ranks, with these exceptions.
   The first dimension may differ in all_gather, gather and all_to_all_uneven. In scatter and broadcast, ranks
   other than the
   root may omit type and shape: ndim is FL_ANY. A rank with invalid arguments joins with a barrier, send
   or recv whose ndim is FL_REFUSED; it equals no other call, and its site contains the reason. The library
   replaces a call by a barrier with ndim FL_WITHDRAWN and the verb as op if the rank raises the mismatch
   of an earlier call instead. A comparison-only call (FL_COMPARED) has no data and itemsize 0; another
   library moves the data. If shapes may differ in a collective, its handle has every rank's signature. */
typedef struct {
  uint64_t sequence; /* number of this call in the group, from 1; set by the library */
  int32_t verb;      /* fl_verb */
  int32_t dtype;     /* fl_dtype plus FL_ON_GPU and FL_COMPARED; other dtypes are only moved, and their number
                        follows the dimensions, as does that of a dtype reduced under another one */
  int32_t op;        /* fl_reduce_op */
  int32_t root;      /* root rank; tag of send and recv; digest of the parts in reduce_scatter_uneven */
  double scale;
  int64_t count;     /* elements */
  int32_t itemsize;  /* bytes */
  int32_t ndim;
  int64_t shape[FL_DIMENSIONS]; /* with more dimensions, the last entry is a hash of the rest */
  int64_t part_of;   /* operation of which it is a step, 1 to 31; 0: none */
} fl_signature;

/* Data of the uneven verbs: this rank's adjacent sections, and the sizes of the sections between all ranks,
   equal on
   every rank: bytes[source * ranks + destination]. */
typedef struct {
  const void *data;
  const int64_t *bytes;
} fl_sections;

/* Output buffer of all_gather and gather, filled if its size equals the number of received bytes. */
typedef struct {
  void *data;
  size_t bytes;
} fl_room;

/* Call site of a program: the end of "folder/file.py:12", and the reason if the call was rejected.
   Zero-terminated; empty: unknown. */
typedef struct {
  char text[FL_SITE_BYTES];
} fl_site;

/* Output of a receive that does not know its source (peer -1) or its number of rows. Receives are matched
   in posting order, receives from any rank included. Among messages that have already arrived, a receive
   from any rank takes turns between the ranks. */
typedef struct {
  int32_t source;  /* result: source rank; -1: no message in time */
  int32_t partial; /* nonzero: the first dimension may be shorter than in the signature */
  int64_t rows;    /* result: first dimension of the received array */
  double patience; /* seconds after which the receive ends well without a message; negative: no limit */
  int32_t *claim;  /* NULL, or a flag shared by receives, also in several groups, of which one takes a message:
                      0, then 1. The other receives end with source -1 when cancelled or matched. */
} fl_match;

/* A send or receive; the signature's root is the tag. */
typedef struct {
  fl_signature signature;
  void *data;
  int peer;
  fl_site site;
  fl_match *match; /* for receives that need it; else NULL */
} fl_message;

/* Message of the last failed function on this thread. */
const char *fl_error(void);

typedef struct fl_op fl_op;

/* Wait up to `seconds` for the operation to end; FL_PENDING if it has not. */
fl_status fl_op_wait(fl_op *op, double seconds);
/* End time in seconds of CLOCK_MONOTONIC; 0 while it runs. */
double fl_op_ended(fl_op *op);
/* Write the end time, in ticks (ticks.h), into *ended when the operation ends, if *ended still equals
   `running`. *ended must live as long as the group. */
void fl_op_stamp(fl_op *op, int64_t *ended, int64_t running);
const char *fl_op_message(fl_op *op);
/* Write the ranks that the failure concerns; return their number. */
int fl_op_missing(fl_op *op, int *ranks, int capacity);
/* Signatures by rank; sequence 0: not received. After FL_TIMEOUT, the last known call of each rank. */
const fl_signature *fl_op_signatures(fl_op *op);
/* Call site of `rank` for its signature; empty: unknown. */
const char *fl_op_site(fl_op *op, int rank);
/* After FL_MISMATCH: number of calls since the call that differs; 0: this call. */
int fl_op_calls_ago(fl_op *op);
/* Approximate seconds between the signature's call of `rank` and the failure; -1: unknown. */
double fl_op_age(fl_op *op, int rank);
/* Data received by all_gather or gather without a fitting fl_room, by scatter without output, or by
   broadcast with FL_ANY. It lives as long as the handle. */
void *fl_op_output(fl_op *op, size_t *bytes);
/* End an unmatched receive with source -1. No effect on other operations. */
int fl_op_cancel(fl_op *op);
/* Wait up to `seconds` until one of the receives that share `claim` has a message. */
void fl_claim_wait(int32_t *claim, double seconds);
/* Free the handle. A running operation continues. */
void fl_op_free(fl_op *op);

/* Reduce `ranks` arrays in rank order into `into`, which may be one of them. Return 0 if `op` does not
   support `dtype`. See csrc/reduce/reduce.h. */
int fl_reduce(int dtype, int op, double scale, void *into, const void *const *from, int ranks,
              size_t count);

/* A group of processes in a library: see group.cdef.h. */
typedef struct fl_group fl_group;
