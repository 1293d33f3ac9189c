/* Codes and limits that C and Python share. Written by scripts/codes: change that. */

/* How an operation stands. */
typedef enum {
  FL_OK, /* it ended well */
  FL_PENDING, /* not finished yet */
  FL_MISMATCH, /* ranks called different things; nothing was changed, the group lives on */
  FL_PEER_LOST, /* a connection broke: see the missing ranks */
  FL_TIMEOUT, /* the missing ranks did not join in time */
  FL_CLOSED, /* the group was closed, or broke in an earlier operation */
  FL_FAILED, /* anything else; the message says what */
  FL_RAISED, /* a rank gave up in words of its own: see fl_give_up */
  FL_HOST_LOST, /* the hosts of the missing ranks cannot be reached */
  FL_LEAVING, /* the missing ranks begin no more messages: see fl_leave */
} fl_status;

typedef enum {
  FL_ALL_REDUCE = 1, FL_REDUCE_SCATTER, FL_BROADCAST, FL_ALL_GATHER, FL_BARRIER, FL_SEND, FL_RECV,
  FL_REDUCE, FL_GATHER, FL_SCATTER, FL_ALL_TO_ALL, FL_ALL_TO_ALL_UNEVEN, FL_REDUCE_SCATTER_UNEVEN, FL_SCAN,
  FL_EXSCAN, FL_VERBS
} fl_verb;

typedef enum {
  FL_BOOL = 0, FL_INT8, FL_INT16, FL_INT32, FL_INT64, FL_UINT8, FL_UINT16, FL_UINT32, FL_UINT64, FL_FLOAT16,
  FL_BFLOAT16, FL_FLOAT32, FL_FLOAT64, FL_LONGDOUBLE, FL_COMPLEX64, FL_COMPLEX128, FL_CLONGDOUBLE, FL_MOVED
} fl_dtype;

typedef enum {
  FL_SUM = 0, FL_PROD, FL_MIN, FL_MAX, FL_AVG, FL_AND, FL_OR, FL_XOR
} fl_reduce_op;

/* Dimensions that a signature has room for, and bytes of the text of an fl_site. */
#define FL_DIMENSIONS 8
#define FL_SITE_BYTES 256

/* In place of the number of dimensions: see fl_signature. */
#define FL_ANY -1
#define FL_REFUSED -2
#define FL_WITHDRAWN -3

/* Added to the dtype of an array of a GPU, and of a call that ranks only compare. */
#define FL_ON_GPU 32
#define FL_COMPARED 64

/* Verbs of flight records alone; those of objects are in the order of COMPOSED (call.py). */
#define FL_SENDRECV 32
#define FL_BROADCAST_OBJECT 33
#define FL_ALL_GATHER_OBJECT 34
#define FL_GATHER_OBJECT 35
#define FL_SCATTER_OBJECT 36

/* Flight records: calls that one has, and flags of a call. */
#define FL_RECORDED_CALLS 512
#define FL_RECORDED_FAILED 1
#define FL_RECORDED_PLACED 2
#define FL_RECORDED_ASYNC 4

/* What csrc/fast must know of a verb, by its code: flags. */
#define FL_VERB_KNOWN 1
#define FL_VERB_ROOTED 2
#define FL_VERB_IN_PLACE 4
#define FL_VERB_REDUCES 8
#define FL_VERB_PREFIX 16
