/* Calls that are more than one plain array: lists of arrays, unequal parts, batches of messages, objects. */
#pragma once

#include "running.h"

PyObject *native_call(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_sendrecv(PyObject *self, PyObject *const *args, Py_ssize_t count);

/* The type of what stands for a public verb: see entry.c. */
PyObject *entry_type(void);

/* all_to_all with `rows`; NotImplemented where Python must do it, and nothing has happened. Where `out` has not
   as many rows as arrive, the result is another array. */
PyObject *native_uneven(Binding *binding, PyObject *x, PyObject *out, PyObject *rows);

/* all_reduce of the arrays of a list: the list; or NotImplemented as native_uneven. Asynchronous: a Work; or a
   tuple of that and a list, of each packed message (its array, the arrays that are in it). Small arrays are
   packed if True is in the place of `out`. */
PyObject *native_several(PyObject *self, PyObject *const *args, int is_async);

/* Begin the messages of `ops`, a list of P2POp: their Work; NotImplemented as native_uneven. */
PyObject *native_batch(PyObject *self, PyObject *ops);
int batch_names(void);

/* native_object(verb, object, root): the list of the objects that have come; None where they are the root's;
   (array of frames, number of the call, this rank's frame or None) where Python must go on; NotImplemented,
   and nothing has happened, where it must do all of it. */
PyObject *native_object(PyObject *self, PyObject *const *args, Py_ssize_t count);
int object_names(void);

/* The Work of one that Python is to look after, with all that it uses. Where a signal handler raises
   meanwhile, nobody may have what the operation still writes to: that stays for ever. */
PyObject *work_for(const Binding *binding, fl_op *op, const started_op *one, PyObject *x, PyObject *out,
                   PyObject *result, PyObject *room);
/* A light Work: of one operation (`count` is 0) with its `result`, `kept` a tuple of its array, its `out` and
   its room, of a receive the bytes of its fl_match or None; or of `count` messages, `result` the list of their
   arrays, `kept` the bytes of as many fl_match or NULL: then it takes over `ops`, which PyMem_Free frees. */
PyObject *make_work(PyObject *owner, started_op *ops, int count, PyObject *result, PyObject *kept);
PyObject *work_type(void);
