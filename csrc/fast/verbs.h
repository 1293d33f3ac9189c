/* Calls with other arguments than one plain array: lists of arrays, uneven parts, batches of messages, objects. */
#pragma once

#include "running.h"

PyObject *native_call(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_sendrecv(PyObject *self, PyObject *const *args, Py_ssize_t count);

/* The type of the public verbs: see entry.c. */
PyObject *entry_type(void);
/* Call a Python function with arguments in the form of METH_FASTCALL | METH_KEYWORDS. */
PyObject *call_function(PyObject *function, PyObject *const *args, Py_ssize_t count, PyObject *keywords);

/* Run all_to_all with `rows`. Return NotImplemented, without effect, if Python must handle the call. If `out`
   has the wrong number of rows, the result is another array. */
PyObject *native_uneven(Binding *binding, PyObject *x, PyObject *out, PyObject *rows);

/* Run all_reduce on a list of arrays, in place, and return the list; or NotImplemented like native_uneven. If
   `out` is True, small arrays are packed into one message. Asynchronous: return a Work, or with packed arrays
   (Work, list with a tuple (packed array, its arrays ...) for each packed message). */
PyObject *native_several(PyObject *self, PyObject *const *args, int is_async);

/* Begin the messages of `ops`, a list of P2POp, and return their Work; NotImplemented like native_uneven. */
PyObject *native_batch(PyObject *self, PyObject *ops);
/* Run native_sendrecv if the groups `parts` of the send and the receive, `calls`, differ. */
PyObject *native_apart(PyObject *self, PyObject *const *args, Binding *const *parts, const plain_call *calls);
/* op_maker(function): return a faster `__new__` of P2POp, which leaves some arguments to `function`. */
PyObject *op_maker(PyObject *module, PyObject *function);
int batch_names(void);

/* native_object(verb, object, root): return the list of received objects, or None if only the root receives.
   If Python must receive the rest: return (array of frames, number of the call, this rank's frame or None).
   If Python must handle the whole call: return NotImplemented, without effect. */
PyObject *native_object(PyObject *self, PyObject *const *args, Py_ssize_t count);
int object_names(void);

/* Return the Python Work of one operation with all objects that it uses. If a signal handler raises
   meanwhile, these objects are leaked, because the operation still writes to them. */
PyObject *work_for(fl_op *op, const started_op *one, PyObject *x, PyObject *out, PyObject *result, PyObject *room);
/* Return a light Work.
   If `count` is 0, it has the one operation *ops. `kept` is (array, out, room); room is the bytes of a
   receive's fl_match, or None.
   Otherwise it has `count` messages and frees `ops` with PyMem_Free. `result` is the list of their arrays,
   and `kept` the bytes with their fl_match, or NULL. */
PyObject *make_work(PyObject *owner, started_op *ops, int count, PyObject *result, PyObject *kept);
PyObject *work_type(void);
