"""Codes and limits that C and Python share. Written by scripts/codes: change that."""

# fmt: off
(
    ALL_REDUCE, REDUCE_SCATTER, BROADCAST, ALL_GATHER, BARRIER, SEND, RECV, REDUCE, GATHER,
    SCATTER, ALL_TO_ALL, ALL_TO_ALL_UNEVEN, REDUCE_SCATTER_UNEVEN, SCAN, EXSCAN, VERBS
) = range(1, 17)
(
    BOOL, INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64, FLOAT16, BFLOAT16, FLOAT32,
    FLOAT64, LONGDOUBLE, COMPLEX64, COMPLEX128, CLONGDOUBLE, MOVED
) = range(0, 18)
(
    SUM, PROD, MIN, MAX, AVG, AND, OR, XOR
) = range(0, 8)

# The names of dtypes, by their codes.
DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
    "bfloat16", "float32", "float64", "longdouble", "complex64", "complex128", "clongdouble"
)

# Dimensions that a signature has room for, and bytes of the text of an fl_site.
DIMENSIONS = 8
SITE_BYTES = 256

# In place of the number of dimensions: see fl_signature.
ANY = -1
REFUSED = -2
WITHDRAWN = -3

# Added to the dtype of an array of a GPU, and of a call that ranks only compare.
ON_GPU = 32
COMPARED = 64

# Verbs of flight records alone; those of objects are in the order of COMPOSED (call.py).
SENDRECV = 32
BROADCAST_OBJECT = 33
ALL_GATHER_OBJECT = 34
GATHER_OBJECT = 35
SCATTER_OBJECT = 36

# Flight records: calls that one has, and flags of a call.
RECORDED_CALLS = 512
RECORDED_FAILED = 1
RECORDED_PLACED = 2
RECORDED_ASYNC = 4

# What csrc/fast must know of a verb, by its code: flags.
VERB_KNOWN = 1
VERB_ROOTED = 2
VERB_IN_PLACE = 4
VERB_REDUCES = 8
VERB_PREFIX = 16
