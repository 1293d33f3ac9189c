/* Objects between ranks: pickled into memory that travels in one collective, and made of what came.

   Frames are those of backends/exchange.py, which makes and reads them where this does not. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define NO_IMPORT_ARRAY
#define PY_ARRAY_UNIQUE_SYMBOL flashlight_fast
#include <numpy/arrayobject.h>
#include <string.h>

#include "binding.h"

/* As in exchange.py and api/objects.py. */
enum { ALIGNED = 16, APART_BYTES = 4096, SHORT_BYTES = 1024, MOST_PADDING = 65536 };
enum { CONTENT, PROBLEM, LATER };
enum { CODE_UINT8 = 5 };
/* Verbs as journal.py numbers them. */
enum { BROADCAST = RING_OBJECTS, ALL_GATHER, GATHER, SCATTER };
enum { READ_ONLY = 0x100 }; /* PyBUF_READ, which the stable ABI of Python 3.10 does not name */

/* A frame: this, the lengths of the buffers, the buffers, and the content, each padded. */
typedef struct {
  int64_t bytes; /* of the content: what was pickled, but for the buffers; or another frame's length, or words */
  int32_t kind, buffers;
} frame_head;

static PyObject *dumps, *loads, *protocol, *name_callback, *name_buffers;

int object_names(void) {
  PyObject *pickle = PyImport_ImportModule("pickle");
  if (pickle == NULL) return 0;
  dumps = PyObject_GetAttrString(pickle, "dumps");
  loads = PyObject_GetAttrString(pickle, "loads");
  protocol = PyLong_FromLong(5);
  name_callback = PyUnicode_InternFromString("buffer_callback");
  name_buffers = PyUnicode_InternFromString("buffers");
  Py_DECREF(pickle);
  return dumps && loads && protocol && name_callback && name_buffers;
}

static int64_t padded(int64_t bytes) { return (bytes + ALIGNED - 1) / ALIGNED * ALIGNED; }

static PyObject *new_bytes(int64_t bytes) {
  npy_intp dims[] = {(npy_intp)bytes};
  return PyArray_New(&PyArray_Type, 1, dims, NPY_UINT8, NULL, NULL, 0, 0, NULL);
}

static char *data_of(PyObject *array) { return PyArray_BYTES((PyArrayObject *)array); }
static int64_t bytes_of(PyObject *array) { return PyArray_NBYTES((PyArrayObject *)array); }

/* What pickle asks of each buffer: whether it goes with the pickle; else it is kept in the list `self`. */
static PyObject *keep_large(PyObject *self, PyObject *buffer) {
  PyObject *raw = PyObject_CallMethod(buffer, "raw", NULL);
  if (raw == NULL) return NULL;
  const Py_ssize_t bytes = PyObject_Size(raw);
  int failed = bytes < 0;
  if (bytes >= APART_BYTES) {
    PyObject *array = PyArray_FromBuffer(raw, PyArray_DescrFromType(NPY_UINT8), -1, 0);
    failed = array == NULL || PyList_Append(self, array) < 0;
    Py_XDECREF(array);
  }
  Py_DECREF(raw);
  return failed ? NULL : PyBool_FromLong(bytes < APART_BYTES);
}

static PyMethodDef keep_def = {"keep_large", keep_large, METH_O, NULL};

static PyObject *pickled(PyObject *object, PyObject *buffers) {
  PyObject *keep = PyCFunction_New(&keep_def, buffers);
  PyObject *given = PyTuple_Pack(2, object, protocol);
  PyObject *options = keep == NULL ? NULL : Py_BuildValue("{OO}", name_callback, keep);
  PyObject *bytes = given && options ? PyObject_Call(dumps, given, options) : NULL;
  Py_XDECREF(keep);
  Py_XDECREF(given);
  Py_XDECREF(options);
  return bytes;
}

static char *append(char *at, const void *data, int64_t bytes) {
  memcpy(at, data, (size_t)bytes);
  memset(at + bytes, 0, (size_t)(padded(bytes) - bytes));
  return at + padded(bytes);
}

/* An array with the frame of an object; NULL with an exception. */
static PyObject *frame_of(PyObject *object) {
  PyObject *buffers = PyList_New(0), *frame = NULL;
  PyObject *pickle = buffers == NULL ? NULL : pickled(object, buffers);
  char *content;
  Py_ssize_t length;
  if (pickle != NULL && PyBytes_AsStringAndSize(pickle, &content, &length) == 0) {
    const frame_head head = {length, CONTENT, (int32_t)PyList_Size(buffers)};
    int64_t bytes = sizeof head + padded(8 * (int64_t)head.buffers) + padded(length);
    for (int i = 0; i < head.buffers; ++i) bytes += padded(bytes_of(PyList_GetItem(buffers, i)));
    frame = new_bytes(bytes);
    if (frame != NULL) {
      char *at = append(data_of(frame), &head, sizeof head);
      int64_t *lengths = memset(at, 0, (size_t)padded(8 * (int64_t)head.buffers));
      at += padded(8 * (int64_t)head.buffers);
      for (int i = 0; i < head.buffers; ++i) {
        PyObject *buffer = PyList_GetItem(buffers, i);
        lengths[i] = bytes_of(buffer);
        at = append(at, data_of(buffer), lengths[i]);
      }
      append(at, content, length);
    }
  }
  Py_XDECREF(pickle);
  Py_XDECREF(buffers);
  return frame;
}

/* The frames of a scatter, one for each rank and all of one length; NULL with an exception, or without one for
   Python: of unequal ones too much would be padding. */
static PyObject *frames_of(PyObject *objects, int size) {
  if (!PyList_CheckExact(objects) || PyList_Size(objects) != size) return NULL;
  PyObject *frames = PyList_New(0), *whole = NULL;
  int64_t longest = 0, total = 0;
  for (int r = 0; frames != NULL && r < size && r < PyList_Size(objects); ++r) {
    PyObject *object = PyList_GetItem(objects, r);
    Py_INCREF(object); /* pickling may change the list */
    PyObject *frame = frame_of(object);
    Py_DECREF(object);
    if (frame == NULL || PyList_Append(frames, frame) < 0) Py_CLEAR(frames);
    if (frame != NULL && bytes_of(frame) > longest) longest = bytes_of(frame);
    if (frame != NULL) total += bytes_of(frame);
    Py_XDECREF(frame);
  }
  if (frames != NULL && PyList_Size(frames) == size && longest * size <= 2 * total + MOST_PADDING) {
    whole = new_bytes(longest * size);
  }
  for (int r = 0; whole != NULL && r < size; ++r) {
    PyObject *frame = PyList_GetItem(frames, r);
    memcpy(data_of(whole) + r * longest, data_of(frame), (size_t)bytes_of(frame));
  }
  Py_XDECREF(frames);
  return whole;
}

/* The frame that says how long the one is that comes later. */
static PyObject *short_frame(PyObject *frame) {
  const frame_head head = {sizeof(int64_t), LATER, 0};
  const int64_t bytes = bytes_of(frame);
  PyObject *made = new_bytes(sizeof head + padded(head.bytes));
  if (made != NULL) append(append(data_of(made), &head, sizeof head), &bytes, head.bytes);
  return made;
}

/* What has come: memory that `op` has, or `owner`. */
typedef struct {
  const Binding *binding;
  fl_op *op;
  char *data;
  size_t bytes;
  PyObject *owner; /* of an array in it; or NULL */
} received;

static void free_op(PyObject *capsule) {
  void (*function)(fl_op *) = (void (*)(fl_op *))PyCapsule_GetContext(capsule);
  function(PyCapsule_GetPointer(capsule, NULL));
}

/* An array of a part of it, which keeps it; NULL with an exception. */
static PyObject *part_of(received *all, char *data, int64_t bytes) {
  if (all->owner == NULL) {
    all->owner = PyCapsule_New(all->op, NULL, free_op);
    if (all->owner == NULL) return NULL;
    PyCapsule_SetContext(all->owner, (void *)all->binding->free);
    all->op = NULL;
  }
  npy_intp dims[] = {(npy_intp)bytes};
  PyObject *array = PyArray_New(&PyArray_Type, 1, dims, NPY_UINT8, NULL, data, 0, NPY_ARRAY_CARRAY, NULL);
  if (array == NULL) return NULL;
  Py_INCREF(all->owner);
  if (PyArray_SetBaseObject((PyArrayObject *)array, all->owner) < 0) Py_CLEAR(array);
  return array;
}

/* Look at the next frame: where its buffers begin, and where what was pickled does. */
static const frame_head *read_frame(char **at, char **buffers, char **pickle) {
  const frame_head *head = (const frame_head *)*at;
  const int64_t *lengths = (const int64_t *)(head + 1);
  *buffers = *pickle = (char *)lengths + padded(8 * (int64_t)head->buffers);
  for (int i = 0; i < head->buffers; ++i) *pickle += padded(lengths[i]);
  *at = *pickle + padded(head->bytes);
  return head;
}

static PyObject *unpickled(received *all, const frame_head *head, char *buffers, char *pickle) {
  const int64_t *lengths = (const int64_t *)(head + 1);
  PyObject *views = PyList_New(0);
  for (int i = 0; views != NULL && i < head->buffers; ++i) {
    PyObject *array = part_of(all, buffers, lengths[i]);
    PyObject *view = array == NULL ? NULL : PyMemoryView_FromObject(array);
    if (view == NULL || PyList_Append(views, view) < 0) Py_CLEAR(views);
    Py_XDECREF(view);
    Py_XDECREF(array);
    buffers += padded(lengths[i]);
  }
  PyObject *content = PyMemoryView_FromMemory(pickle, (Py_ssize_t)head->bytes, READ_ONLY);
  PyObject *given = content == NULL ? NULL : PyTuple_Pack(1, content);
  PyObject *options = views == NULL ? NULL : Py_BuildValue("{OO}", name_buffers, views);
  PyObject *object = given && options ? PyObject_Call(loads, given, options) : NULL;
  Py_XDECREF(content);
  Py_XDECREF(given);
  Py_XDECREF(options);
  Py_XDECREF(views);
  return object;
}

/* The list of what has come, in the order of ranks, with `own` in its place, or of the one object; None where
   that is for others alone; NULL with an exception, or without one where not all has come, or one rank had
   nothing. */
static PyObject *objects_of(received *all, int verb, int rank, int root, PyObject *own) {
  const int gathers = verb == ALL_GATHER || verb == GATHER, wanted = verb != GATHER || rank == root;
  char *at = all->data, *end = gathers ? at + all->bytes : at + 1, *buffers, *pickle;
  PyObject *list = PyList_New(0);
  for (int r = 0; list != NULL && at < end; ++r) {
    const frame_head *head = read_frame(&at, &buffers, &pickle);
    if (head->kind != CONTENT) {
      Py_CLEAR(list);
    } else if (wanted) {
      const int is_own = r == rank && gathers;
      PyObject *object = is_own ? own : unpickled(all, head, buffers, pickle);
      if (object == NULL || PyList_Append(list, object) < 0) Py_CLEAR(list);
      if (!is_own) Py_XDECREF(object);
    }
  }
  if (list == NULL || wanted) return list;
  Py_DECREF(list);
  Py_RETURN_NONE;
}

/* All of what has come, for Python, the number of the call and this rank's frame; after an exception the
   same: it raises another one, in its words. */
static PyObject *left_over(received *all, uint64_t id, PyObject *frame) {
  if (PyErr_Occurred() != NULL && !PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
  PyErr_Clear();
  PyObject *array = part_of(all, all->data, (int64_t)all->bytes);
  return array == NULL ? NULL : Py_BuildValue("(NKO)", array, (unsigned long long)id, frame);
}

static PyObject *list_of(PyObject *object) {
  PyObject *list = PyList_New(0);
  if (list != NULL && PyList_Append(list, object) < 0) Py_CLEAR(list);
  return list;
}

static PyObject *made_of(received *all, int verb, int root, PyObject *own, PyObject *frame, recorded made) {
  const Binding *binding = all->binding;
  if (made.row->id == made.id && verb == BROADCAST) made.row->bytes = (int64_t)all->bytes;
  PyObject *result = objects_of(all, verb, binding->rank, root, own);
  if (result == NULL) result = left_over(all, made.id, frame);
  if (all->op != NULL) binding->free(all->op);
  Py_XDECREF(all->owner);
  return result;
}

/* The result of a call that has ended, or that `op` describes. `given` is what this rank has given, or
   None, and `frame` all that it has. */
static PyObject *end(const Binding *binding, fl_op *op, int verb, PyObject *own, PyObject *frame,
                     PyObject *given, plain_call *call, recorded made) {
  const int is_known = (verb == BROADCAST || verb == SCATTER) && binding->rank == call->signature.root;
  const int root = call->signature.root;
  received all = {binding, op, NULL, 0, NULL};
  if (op != NULL && binding->wait(op, 0) == FL_OK) {
    all.data = binding->output(op, &all.bytes);
  } else if (op != NULL) {
    call->signature.verb = verb;
    call->result = is_known ? given : NULL;
    all.op = NULL;
    all.owner = fetch(binding, op, given, Py_None, call, made);
    if (all.owner == NULL) return NULL;
    all.data = data_of(all.owner);
    all.bytes = (size_t)bytes_of(all.owner);
  }
  if (!is_known) return made_of(&all, verb, root, own, frame, made);
  if (all.op != NULL) binding->free(all.op);
  Py_XDECREF(all.owner);
  return list_of(verb == SCATTER ? PyList_GetItem(own, binding->rank) : own);
}

/* What the library runs: of this rank's frame, or of FL_ANY where that is None. */
static plain_call call_of(const Binding *binding, int verb, int root, PyObject *given) {
  static const int verbs[] = {FL_BROADCAST, FL_ALL_GATHER, FL_ALL_GATHER, FL_SCATTER};
  plain_call call;
  memset(&call, 0, sizeof call);
  fl_signature *s = &call.signature;
  s->verb = verbs[verb - BROADCAST];
  s->part_of = 1 + verb - BROADCAST;
  s->scale = 1.0;
  s->root = s->verb == FL_ALL_GATHER ? 0 : root;
  s->ndim = FL_ANY;
  call.peer = -1;
  call.seconds = binding->seconds;
  if (given == Py_None) return call;
  s->dtype = CODE_UINT8;
  s->itemsize = 1;
  s->ndim = 1;
  s->count = s->shape[0] = bytes_of(given) / (verb == SCATTER ? binding->size : 1);
  call.data = data_of(given);
  return call;
}

static PyObject *run(Binding *binding, int verb, PyObject *object, int root, PyObject *frame,
                     PyObject *given) {
  plain_call call = call_of(binding, verb, root, given);
  fl_signature shown = call.signature;
  shown.verb = verb;
  shown.root = root;
  shown.ndim = FL_ANY;
  shown.count = frame == Py_None ? 0 : bytes_of(frame);
  shown.itemsize = 1;
  fl_op *op;
  recorded made;
  if (!run_in_steps(binding, &call, &shown, &op, &made) &&
      !run_at_once(binding, &call, &shown, &op, &made)) {
    return NULL;
  }
  PyObject *result = end(binding, op, verb, object, frame, given, &call, made);
  ring_end(made.row, made.id, result == NULL);
  return result;
}

/* native_object(verb, object, root): the list of the objects that have come; None where they are the root's;
   (array of frames, number of the call, this rank's frame or None) where Python must go on; NotImplemented,
   and nothing has happened, where it must do all of it. */
PyObject *native_object(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Binding *binding = binding_of(self);
  if (binding == NULL) return NULL;
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "expected (verb, object, root)");
    return NULL;
  }
  int32_t verb, root;
  const int inside = is_inside(binding);
  if (inside < 0) return NULL;
  if (inside || is_left_to_python(binding) || !plain_int(args[0], SCATTER, &verb) ||
      verb < BROADCAST || !plain_int(args[2], binding->size - 1, &root)) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  PyObject *frame = Py_None;
  if (verb == ALL_GATHER || verb == GATHER || binding->rank == root) {
    frame = verb == SCATTER ? frames_of(args[1], binding->size) : frame_of(args[1]);
  } else {
    Py_INCREF(frame);
  }
  if (frame == NULL) {
    if (PyErr_Occurred() != NULL && !PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
    PyErr_Clear();
    Py_RETURN_NOTIMPLEMENTED;
  }
  PyObject *given = frame;
  if (verb == GATHER && bytes_of(frame) > SHORT_BYTES) {
    given = short_frame(frame);
  } else {
    Py_INCREF(given);
  }
  PyObject *result = given == NULL ? NULL : run(binding, verb, args[1], root, frame, given);
  Py_XDECREF(given);
  Py_DECREF(frame);
  return result;
}
