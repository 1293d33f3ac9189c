/* Works of operations that were started. */
#pragma once

#include "running.h"

/* The Work of one that Python is to look after, with all that it uses. Where a signal handler raises
   meanwhile, nobody may have what the operation still writes to: that stays for ever. */
PyObject *work_for(const Binding *binding, fl_op *op, const started_op *one, PyObject *x, PyObject *out,
                   PyObject *result, PyObject *room);
/* A light Work: of one operation (`count` is 0) with its `result`, `kept` a tuple of its array, its `out` and
   its room, of a receive the bytes of its fl_match or None; or of `count` messages, `result` the list of their
   arrays, `kept` the bytes of as many fl_match or NULL: then it takes over `ops`, which PyMem_Free frees. */
PyObject *make_work(PyObject *owner, started_op *ops, int count, PyObject *result, PyObject *kept);
PyObject *work_type(void);
