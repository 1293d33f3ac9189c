/* all_reduce of several plain arrays: one by one, or small arrays of one dtype packed into one message. */

#include <limits.h>
#include <string.h>

#include "verbs.h"

typedef struct {
  plain_call call;
  PyObject *x;           /* a reference */
  int is_done, is_first; /* is_done: the array has its message. is_first: it is the message's first */
} item;

typedef struct {
  item *items;
  Py_ssize_t count;
  const item **message; /* the items of one message, with space for all items */
  plain_span *spans;    /* one per item */
  int64_t limit;        /* maximum bytes of an array that is packed with others */
} list;

static int64_t bytes_of(const item *entry) {
  return entry->call.signature.count * entry->call.signature.itemsize;
}

/* Read all arrays. Return 1, or 0 if an array is not plain. */
static int read_all(const Binding *binding, PyObject *xs, PyObject *const *args, list *all) {
  PyObject *item_args[] = {args[0], NULL, Py_None, args[3], args[4], args[5], args[6], args[7]};
  const int is_list = PyList_CheckExact(xs);
  for (Py_ssize_t i = 0; i < all->count; ++i) {
    item *entry = &all->items[i];
    plain_call *call = &entry->call;
    item_args[1] = is_list ? PyList_GetItem(xs, i) : PyTuple_GetItem(xs, i);
    if (!PyArray_CheckExact(item_args[1]) || plain_read(item_args, binding->rank, binding->size, call) != 1) {
      all->count = i;
      return 0;
    }
    const char *data = call->data;
    entry->x = call->result;
    entry->is_done = entry->is_first = 0;
    all->spans[i] = (plain_span){data, data + bytes_of(entry), 1};
    if (is_alone(binding) && !can_run_alone(call, Py_None)) {
      all->count = i + 1;
      return 0;
    }
  }
  return 1;
}

/* Store in `all->message` the arrays that share a message with `first`, in list order, and return their
   number. plan_messages in flashlight_py/distributed/api/reductions.py makes the same choice. */
static int choose(const list *all, const item *first) {
  enum { MOST_PACKED = 64 }; /* packed arrays of this many times the limit fit into the second-level cache */
  int number = 0;
  int64_t bytes = bytes_of(first);
  all->message[number++] = first;
  if (bytes > all->limit) return number;
  for (const item *entry = first + 1; entry < all->items + all->count; ++entry) {
    const int64_t more = bytes_of(entry);
    if (entry->is_done || entry->call.signature.dtype != first->call.signature.dtype || more > all->limit) continue;
    bytes += more;
    if (bytes > MOST_PACKED * all->limit) break;
    all->message[number++] = entry;
  }
  return number;
}

/* Return the call for the packed arrays. Its root is a digest of their shapes, which the ranks compare. */
static plain_call packed_call(const item *const *message, int number) {
  plain_call call = message[0]->call;
  fl_signature *s = &call.signature;
  uint64_t digest = 0;
  s->count = 0;
  for (int i = 0; i < number; ++i) {
    const fl_signature *part = &message[i]->call.signature;
    s->count += part->count;
    digest = digest * 1099511628211u + (uint64_t)part->ndim;
    for (int d = 0; d < part->ndim; ++d) digest = digest * 1099511628211u + (uint64_t)part->shape[d];
  }
  s->ndim = 1;
  s->shape[0] = s->count;
  s->root = 1 + (int32_t)(digest >> 34);
  return call;
}

/* Copy the arrays of a message to `flat`, or from `flat` if `is_back`. */
static void copy_parts(const item *const *message, int number, char *flat, int is_back) {
  for (int i = 0; i < number; ++i) {
    const size_t bytes = (size_t)bytes_of(message[i]);
    void *data = message[i]->call.data;
    memcpy(is_back ? data : flat, is_back ? flat : data, bytes);
    flat += bytes;
  }
}

/* Describe a message and return its array: its only array, or a new packed array; NULL with an exception. */
static PyObject *describe(const item *const *message, int number, plain_call *call) {
  PyObject *x = message[0]->x;
  *call = message[0]->call;
  if (number == 1) return Py_NewRef(x);
  *call = packed_call(message, number);
  npy_intp length = (npy_intp)call->signature.count;
  PyArray_Descr *descr = (PyArray_Descr *)Py_NewRef(PyArray_DESCR((PyArrayObject *)x));
  x = PyArray_NewFromDescr(&PyArray_Type, descr, 1, &length, NULL, NULL, 0, NULL);
  if (x == NULL) return NULL;
  call->data = PyArray_DATA((PyArrayObject *)x);
  copy_parts(message, number, call->data, 0);
  return x;
}

static int run_message_of(Binding *binding, const item *const *message, int number) {
  plain_call call;
  PyObject *x = describe(message, number, &call);
  if (x == NULL) return 0;
  call.result = Py_NewRef(x);
  PyObject *y = run_collective(binding, x, Py_None, &call);
  if (y != NULL && number > 1) copy_parts(message, number, call.data, 1);
  Py_XDECREF(y);
  Py_DECREF(x);
  return y != NULL;
}

static PyObject *run_all(Binding *binding, PyObject *xs, const list *all) {
  for (item *first = all->items; first < all->items + all->count; ++first) {
    if (first->is_done) continue;
    const int number = choose(all, first);
    if (!run_message_of(binding, all->message, number)) return NULL;
    for (int i = 0; i < number; ++i) all->items[all->message[i] - all->items].is_done = 1;
  }
  return PyList_CheckExact(xs) ? Py_NewRef(xs) : PySequence_List(xs);
}

/* Mark the arrays in the message of `first` as done. Append the array that the message sends to `arrays`. If
   it is a packed array, append (packed array, its arrays ...) to `packs`. Return 0 with an exception. */
static int pack_message(const list *all, item *first, PyObject *arrays, PyObject *packs) {
  const int number = choose(all, first);
  plain_call call;
  PyObject *x = describe(all->message, number, &call);
  PyObject *pack = x == NULL || number == 1 ? NULL : PyTuple_New(number + 1);
  int is_good = x != NULL && PyList_Append(arrays, x) == 0 && (number == 1 || pack != NULL);
  for (int i = 0; i < number; ++i) {
    all->items[all->message[i] - all->items].is_done = 1;
    if (pack != NULL) PyTuple_SetItem(pack, i + 1, Py_NewRef(all->message[i]->x));
  }
  if (pack != NULL) {
    PyTuple_SetItem(pack, 0, Py_NewRef(x));
    is_good = is_good && PyList_Append(packs, pack) == 0;
    Py_DECREF(pack);
  }
  Py_XDECREF(x);
  first->call = call;
  first->is_first = 1;
  return is_good;
}

/* Start all messages: return their Work, or (Work, list of packed messages). */
static PyObject *start_all(PyObject *self, const list *all) {
  Binding *binding = binding_of(self);
  PyObject *place = NULL, *arrays = PyList_New(0), *packs = PyList_New(0), *result = NULL;
  const fl_site *site;
  started_op *ops = PyMem_Malloc((size_t)all->count * sizeof *ops);
  int is_good = arrays != NULL && packs != NULL && ops != NULL;
  is_good = is_good && (is_alone(binding) || place_and_site(binding, &place, &site));
  item *const end = all->items + all->count;
  for (item *entry = all->items; is_good && entry < end; ++entry) {
    if (!entry->is_done) is_good = pack_message(all, entry, arrays, packs);
  }
  if (is_good) {
    int number = 0;
    for (item *entry = all->items; entry < end; ++entry) {
      if (entry->is_first) ops[number++] = start_one(binding, &entry->call, place, site);
    }
    PyObject *work = make_work(self, ops, number, arrays, NULL);
    result = work;
    if (work != NULL && PyList_Size(packs) != 0) {
      result = PyTuple_Pack(2, work, packs);
      Py_DECREF(work);
    }
  } else {
    if (ops == NULL) PyErr_NoMemory();
    PyMem_Free(ops);
  }
  Py_XDECREF(arrays);
  Py_XDECREF(packs);
  return result;
}

PyObject *native_several(PyObject *self, PyObject *const *args, int is_async) {
  enum { FEW = 8 };
  Binding *binding = binding_of(self);
  item few[FEW];
  const item *few_of_message[FEW];
  plain_span few_spans[FEW];
  PyObject *xs = args[1], *result;
  const Py_ssize_t count = PyList_CheckExact(xs) || PyTuple_CheckExact(xs) ? PySequence_Size(xs) : 0;
  const int packs = args[2] == Py_True && !is_alone(binding);
  list all = {few, count, few_of_message, few_spans, packs ? binding->packed_bytes[is_async] : -1};
  if (count <= 0 || count >= INT_MAX || binding->most != NULL) Py_RETURN_NOTIMPLEMENTED;
  if (count > FEW) {
    all.items = PyMem_Malloc((size_t)count * (sizeof(item) + sizeof(plain_span) + sizeof(item *)));
    if (all.items == NULL) return PyErr_NoMemory();
    all.spans = (plain_span *)(void *)(all.items + count);
    all.message = (const item **)(void *)(all.spans + count);
  }
  if (!read_all(binding, xs, args, &all) || plain_mixed_up(all.spans, (int)count)) {
    PyErr_Clear(); /* Python then raises the error with its own text */
    result = Py_NewRef(Py_NotImplemented);
  } else {
    result = is_async ? start_all(self, &all) : run_all(binding, xs, &all);
  }
  for (Py_ssize_t i = 0; i < all.count; ++i) Py_DECREF(all.items[i].x);
  if (all.items != few) PyMem_Free(all.items);
  return result;
}
