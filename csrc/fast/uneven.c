/* all_to_all with uneven parts of plain arrays: the ranks exchange their row counts and then move the rows.
   Both steps are the same calls as in Python (backends/native.py). */

#include "verbs.h"

#include "../shm/shm.cdef.h"

enum { MOST_RANKS = 16 };  /* with more ranks, moving takes longer than Python's overhead */
enum { PART_OF_ROWS = 8 }; /* index, from 1, of all_to_all(rows=...) in COMPOSED of call.py */

/* Read `rows`, a list or tuple of row counts for `size` ranks; return 0 unless they sum to `have`. */
static int read_rows(PyObject *rows, int size, int64_t have, int64_t *counts) {
  const int is_list = PyList_CheckExact(rows);
  if ((is_list ? PyList_Size(rows) : PyTuple_Size(rows)) != size) return 0;
  for (int r = 0; r < size; ++r) {
    PyObject *item = is_list ? PyList_GetItem(rows, r) : PyTuple_GetItem(rows, r);
    if (!PyLong_CheckExact(item)) return 0;
    int overflow = 0;
    counts[r] = PyLong_AsLongAndOverflow(item, &overflow);
    if (overflow != 0 || counts[r] < 0 || counts[r] > have) return 0;
    have -= counts[r];
  }
  return have == 0;
}

/* Return the call that exchanges the row counts of all ranks. */
static plain_call table_of(int size, int64_t *counts, int64_t *table) {
  plain_call call;
  plain_begin(&call, FL_ALL_GATHER);
  fl_signature *s = &call.signature;
  s->dtype = FL_INT64;
  s->count = s->shape[0] = size;
  s->itemsize = sizeof(int64_t);
  s->ndim = 1;
  s->part_of = PART_OF_ROWS;
  call.data = counts;
  call.room = (fl_room){table, sizeof(int64_t) * (size_t)size * (size_t)size};
  return call;
}

/* Run the next step of the call. Between the steps, no other thread may begin a call. */
static fl_op *run_step(Binding *binding, const plain_call *call, ring_call *row) {
  if (binding->library.begin(binding->group, &call->signature, call->data, binding->seconds, NULL)) {
    return finish_collective(binding, call, row);
  }
  fl_op *op;
  Py_BEGIN_ALLOW_THREADS;
  op = binding->library.run(binding->group, &call->signature, call->data, call->output, -1, binding->seconds, 0, NULL);
  Py_END_ALLOW_THREADS;
  return op;
}

/* No memory for this rank's result: answer the other ranks' call with a rejected call, so that they raise. */
static void refuse(Binding *binding, ring_call *row) {
  plain_call call;
  plain_begin(&call, FL_BARRIER);
  call.signature.ndim = FL_REFUSED;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  fl_op *op = run_step(binding, &call, row);
  if (op != NULL) binding->library.free(op);
  PyErr_Restore(type, value, trace);
}

/* Run the second step. call->result receives the result, a new reference, or NULL with an exception. */
static fl_op *move(Binding *binding, PyObject *x, PyObject *out, const int64_t *table, plain_call *call,
                   ring_call *row) {
  const int size = binding->size;
  const fl_signature *s = &call->signature;
  int64_t row_bytes = s->itemsize; /* nonzero even if this rank has no rows */
  for (int d = 1; d < s->ndim; ++d) row_bytes *= s->shape[d];
  int64_t arrive = 0, bytes[MOST_RANKS * MOST_RANKS];
  for (int r = 0; r < size; ++r) arrive += table[r * size + binding->rank];
  if (call->output != NULL && call->rows == arrive) {
    call->result = Py_NewRef(out);
  } else {
    call->result = plain_rows(x, call, arrive);
    if (call->result == NULL) {
      refuse(binding, row);
      return NULL;
    }
    call->output = PyArray_DATA((PyArrayObject *)call->result);
  }
  for (int i = 0; i < size * size; ++i) bytes[i] = table[i] * row_bytes;
  fl_sections sections = {call->data, bytes};
  plain_call step = *call;
  step.signature.verb = FL_ALL_TO_ALL_UNEVEN;
  step.data = &sections;
  return run_step(binding, &step, row);
}

PyObject *native_uneven(Binding *binding, PyObject *x, PyObject *out, PyObject *rows) {
  const int size = binding->size;
  plain_call call;
  int64_t counts[MOST_RANKS], table[MOST_RANKS * MOST_RANKS];
  if (binding->library.begin == NULL || size > MOST_RANKS || !plain_uneven(x, out, &call) ||
      !read_rows(rows, size, call.signature.shape[0], counts)) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  plain_call step = table_of(size, counts, table);
  step.output = &step.room;
  fl_op *op;
  recorded entry;
  if (!run_in_steps(binding, &step, &call.signature, &op, &entry)) Py_RETURN_NOTIMPLEMENTED;
  binding->calls->callers[0] = PyThread_get_thread_ident();
  if (op == NULL) op = move(binding, x, out, table, &call, entry.row);
  binding->calls->callers[0] = 0;
  PyObject *result = call.result;
  if (op != NULL) {
    result = fetch(binding, op, x, out, &call, entry);
    Py_XDECREF(call.result);
  }
  ring_end(entry.row, entry.id, result == NULL);
  return result;
}
