/* What both native backends have: calls, and operations that can be waited for. Needs codes.cdef.h.

   CFFI reads these files, the compiler includes them: no drift. No exception crosses this ABI.
   A function that makes something returns NULL if it fails, one that returns an int -1, unless it says
   otherwise; then fl_error() has the message. */

/* What a rank calls. Every rank's travels ahead of the payload and must equal every other's;
   all_gather, gather and all_to_all_uneven let the first dimension differ, and a rank that is not
   the root of a scatter or a broadcast may leave out what it expects: ndim is FL_ANY then. A rank whose program gave
   what cannot be called joins all the same, by a barrier, send or recv whose ndim is FL_REFUSED: that
   equals no other rank's call, and its site says why. The library itself replaces a call by a barrier whose
   ndim is FL_WITHDRAWN, and whose op is the verb, if it raises the mismatch of an earlier call instead.
   A call that ranks only compare (FL_COMPARED) has no data, and its itemsize is 0. The handle of a collective in
   which shapes may differ has every rank's signature. What moves then, another library moves. */
typedef struct {
  uint64_t sequence; /* calls of this group so far, this one included; filled in by the library */
  int32_t verb;      /* fl_verb */
  int32_t dtype;     /* fl_dtype, and FL_ON_GPU, FL_COMPARED; what is above is only moved, and a number of its
                        dtype follows the dimensions, as of another that is reduced in place of it */
  int32_t op;        /* fl_reduce_op */
  int32_t root;      /* root rank; the tag of send and recv; a digest of the parts of an uneven
                        reduce_scatter */
  double scale;
  int64_t count;     /* elements */
  int32_t itemsize;  /* bytes */
  int32_t ndim;
  int64_t shape[FL_DIMENSIONS]; /* of more dimensions, the last is a hash of all from that one on */
  int64_t part_of;   /* what it is a step of, a number from 1 to 31; 0: a call by itself */
} fl_signature;

/* What the uneven verbs are given as data: this rank's sections, one after the other, and the bytes
   that each rank has for each: bytes[source * ranks + destination], the same on every rank. */
typedef struct {
  const void *data;
  const int64_t *bytes;
} fl_sections;

/* What all_gather and gather may be given as output: room that is filled where exactly as many bytes
   come. */
typedef struct {
  void *data;
  size_t bytes;
} fl_room;

/* Where a program calls: the end of "folder/file.py:12", and of a call that it refused also why;
   closed by a zero; empty: not known. */
typedef struct {
  char text[FL_SITE_BYTES];
} fl_site;

/* What a receive is given as output that does not know who sends (its peer is -1 then), or how many
   rows. Receives are matched in the order in which they were posted, those of any rank among those that
   name one; of what has come before, such a receive takes something of each rank in turn. */
typedef struct {
  int32_t source;  /* filled in: the rank that has sent; -1: none in time */
  int32_t partial; /* not 0: the first dimension may be shorter than the signature's */
  int64_t rows;    /* filled in: the first dimension of what has come */
  double patience; /* seconds after which all is well without a message; negative: no limit */
  int32_t *claim;  /* NULL; or shared by receives of which one is to take a message, in several groups: 0,
                      then 1; the others end without one (source -1) when they are cancelled, or tried */
} fl_match;

/* A send or a receive; the root of its signature is the tag. */
typedef struct {
  fl_signature signature;
  void *data;
  int peer;
  fl_site site;
  fl_match *match; /* of a receive that needs one; else NULL */
} fl_message;

/* Why the last of these functions on this thread that returned -1, or NULL in place of what it makes, has
   failed. */
const char *fl_error(void);

typedef struct fl_op fl_op;

/* Wait up to `seconds` for the operation to end. FL_PENDING when it has not. */
fl_status fl_op_wait(fl_op *op, double seconds);
/* When it ended, in seconds of CLOCK_MONOTONIC; 0 while it runs. */
double fl_op_ended(fl_op *op);
/* Have whoever ends the operation write when, in ticks (ticks.h), into *ended, which must live as long
   as the group; unless something else than `running` stands there by then. */
void fl_op_stamp(fl_op *op, int64_t *ended, int64_t running);
const char *fl_op_message(fl_op *op);
/* Write which ranks the failure is about; returns how many. */
int fl_op_missing(fl_op *op, int *ranks, int capacity);
/* What each rank called, of those whose signature arrived (the others have sequence 0); after
   FL_TIMEOUT what each is known to have called last. */
const fl_signature *fl_op_signatures(fl_op *op);
/* Where `rank` called that; empty: not known. */
const char *fl_op_site(fl_op *op, int rank);
/* After FL_MISMATCH: how many calls of the group before this one; 0: it is this one. */
int fl_op_calls_ago(fl_op *op);
/* How many seconds before the failure it did so, roughly; -1: not known. */
double fl_op_age(fl_op *op, int rank);
/* What all_gather, gather, a scatter without output and a broadcast of FL_ANY received, unless it went
   into a room; lives as long as the handle. */
void *fl_op_output(fl_op *op, size_t *bytes);
/* End a receive that nothing has come for: its source is -1. Does nothing to another operation. */
int fl_op_cancel(fl_op *op);
/* Wait up to `seconds` until one of the receives that share `claim` has a message. */
void fl_claim_wait(int32_t *claim, double seconds);
/* Free the handle. An operation that has not ended goes on. */
void fl_op_free(fl_op *op);

/* Combine `ranks` arrays in rank order into `into`, which may be one of them; 0 where dtype and
   op do not go together. See csrc/reduce/reduce.h. */
int fl_reduce(int dtype, int op, double scale, void *into, const void *const *from, int ranks,
              size_t count);

/* A group of processes in a library: see group.cdef.h. */
typedef struct fl_group fl_group;
