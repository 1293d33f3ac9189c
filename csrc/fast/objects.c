/* Objects between ranks: pickled into memory that one collective sends, and unpickled.

   backend.py defines the frames, and handles the calls that this file does not. */

#include <string.h>

#include "verbs.h"

/* Same values as in backend.py and api/objects.py. */
enum { ALIGNED = 16, APART_BYTES = 4096, SHORT_BYTES = 1024, MOST_PADDING = 65536 };
enum { CONTENT, PROBLEM, LATER };
enum { READ_ONLY = 0x100 }; /* PyBUF_READ, which the stable ABI of Python 3.10 does not define */

/* A frame: this header, the lengths of the buffers, the buffers, and the content, each padded. */
typedef struct {
  int64_t bytes; /* bytes of the content: pickle data without buffers, length of another frame, or a message */
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

/* Callback of pickle for each buffer. Return True to pickle it in-band; else append it to the list `self`. */
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
  PyObject *call_args = PyTuple_Pack(2, object, protocol);
  PyObject *options = keep == NULL ? NULL : Py_BuildValue("{OO}", name_callback, keep);
  PyObject *bytes = call_args && options ? PyObject_Call(dumps, call_args, options) : NULL;
  Py_XDECREF(keep);
  Py_XDECREF(call_args);
  Py_XDECREF(options);
  return bytes;
}

static char *append(char *at, const void *data, int64_t bytes) {
  memcpy(at, data, (size_t)bytes);
  memset(at + bytes, 0, (size_t)(padded(bytes) - bytes));
  return at + padded(bytes);
}

/* Return an array with the frame of an object; NULL with an exception. */
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

/* Return the frames of a scatter, one per rank and of equal length; NULL with an exception. NULL without an
   exception: Python must handle the scatter, because unequal frames would need too much padding. */
static PyObject *frames_of(PyObject *objects, int size) {
  if (!PyList_CheckExact(objects) || PyList_Size(objects) != size) return NULL;
  PyObject *frames = PyList_New(0), *joined = NULL;
  int64_t longest = 0, total = 0;
  for (int r = 0; frames != NULL && r < size && r < PyList_Size(objects); ++r) {
    PyObject *object = Py_NewRef(PyList_GetItem(objects, r)); /* pickling may change the list */
    PyObject *frame = frame_of(object);
    Py_DECREF(object);
    if (frame == NULL || PyList_Append(frames, frame) < 0) Py_CLEAR(frames);
    if (frame != NULL && bytes_of(frame) > longest) longest = bytes_of(frame);
    if (frame != NULL) total += bytes_of(frame);
    Py_XDECREF(frame);
  }
  if (frames != NULL && PyList_Size(frames) == size && longest * size <= 2 * total + MOST_PADDING) {
    joined = new_bytes(longest * size);
  }
  for (int r = 0; joined != NULL && r < size; ++r) {
    PyObject *frame = PyList_GetItem(frames, r);
    memcpy(data_of(joined) + r * longest, data_of(frame), (size_t)bytes_of(frame));
  }
  Py_XDECREF(frames);
  return joined;
}

/* Return a frame with the length of the frame that follows later. */
static PyObject *short_frame(PyObject *frame) {
  const frame_head head = {sizeof(int64_t), LATER, 0};
  const int64_t bytes = bytes_of(frame);
  PyObject *length_frame = new_bytes(sizeof head + padded(head.bytes));
  if (length_frame != NULL) append(append(data_of(length_frame), &head, sizeof head), &bytes, head.bytes);
  return length_frame;
}

typedef struct {
  Binding *binding;
  int32_t verb, root;
  PyObject *object;        /* borrowed */
  PyObject *frame;         /* all data of this rank for other ranks; None: it sends nothing */
  PyObject *sent; /* the data of `frame` that the collective sends */
} object_call;

static int gathers(const object_call *call) { return call->verb == FL_ALL_GATHER_OBJECT || call->verb == FL_GATHER_OBJECT; }
static int is_root(const object_call *call) { return call->binding->rank == call->root; }

/* Received data: memory of `op` or of `owner`. */
typedef struct {
  const Binding *binding;
  fl_op *op;       /* NULL: `owner` has the memory */
  PyObject *owner; /* array that owns `data`; or NULL */
  char *data;
  size_t bytes;
} received;

static void own_array(received *all, PyObject *array) {
  all->op = NULL;
  all->owner = array;
  all->data = data_of(array);
  all->bytes = (size_t)bytes_of(array);
}

static void release(received *all) {
  if (all->op != NULL) all->binding->library.free(all->op);
  Py_XDECREF(all->owner);
}

static void free_op(PyObject *capsule) {
  void (*function)(fl_op *) = (void (*)(fl_op *))PyCapsule_GetContext(capsule);
  function(PyCapsule_GetPointer(capsule, NULL));
}

/* Return an array over part of the data that keeps the data alive; NULL with an exception. */
static PyObject *part_of(received *all, char *data, int64_t bytes) {
  if (all->owner == NULL) {
    all->owner = PyCapsule_New(all->op, NULL, free_op);
    if (all->owner == NULL) return NULL;
    PyCapsule_SetContext(all->owner, (void *)all->binding->library.free);
    all->op = NULL;
  }
  npy_intp dims[] = {(npy_intp)bytes};
  PyObject *array = PyArray_New(&PyArray_Type, 1, dims, NPY_UINT8, NULL, data, 0, NPY_ARRAY_CARRAY, NULL);
  if (array == NULL) return NULL;
  if (PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(all->owner)) < 0) Py_CLEAR(array);
  return array;
}

static PyObject *unpickled(received *all, const frame_head *head, char *at) {
  const int64_t *lengths = (const int64_t *)(head + 1);
  PyObject *views = head->buffers == 0 ? NULL : PyList_New(0), *options = NULL, *object = NULL;
  for (int i = 0; views != NULL && i < head->buffers; ++i) {
    PyObject *array = part_of(all, at, lengths[i]);
    PyObject *view = array == NULL ? NULL : PyMemoryView_FromObject(array);
    if (view == NULL || PyList_Append(views, view) < 0) Py_CLEAR(views);
    Py_XDECREF(view);
    Py_XDECREF(array);
    at += padded(lengths[i]);
  }
  PyObject *content = PyMemoryView_FromMemory(at, (Py_ssize_t)head->bytes, READ_ONLY);
  PyObject *call_args = content == NULL ? NULL : PyTuple_Pack(1, content);
  if (views != NULL) options = Py_BuildValue("{OO}", name_buffers, views);
  if (call_args && (options || head->buffers == 0)) object = PyObject_Call(loads, call_args, options);
  Py_XDECREF(content);
  Py_XDECREF(call_args);
  Py_XDECREF(options);
  Py_XDECREF(views);
  return object;
}

/* Return a list: all objects in rank order with this rank's own object, or the single received object. Return
   None if only other ranks receive. NULL: an exception; NULL without an exception: missing data. */
static PyObject *objects_of(const object_call *call, received *all) {
  const int several = gathers(call), receives = call->verb != FL_GATHER_OBJECT || is_root(call);
  char *at = all->data, *end = several ? at + all->bytes : at + 1;
  PyObject *list = PyList_New(0);
  for (int r = 0; list != NULL && at < end; ++r) {
    const frame_head *head = (const frame_head *)at;
    const int64_t *lengths = (const int64_t *)(head + 1);
    char *buffers = (char *)lengths + padded(8 * (int64_t)head->buffers);
    at = buffers + padded(head->bytes);
    for (int i = 0; i < head->buffers; ++i) at += padded(lengths[i]);
    if (head->kind != CONTENT) {
      Py_CLEAR(list);
    } else if (receives) {
      const int is_own = several && r == call->binding->rank;
      PyObject *object = is_own ? Py_NewRef(call->object) : unpickled(all, head, buffers);
      if (object == NULL || PyList_Append(list, object) < 0) Py_CLEAR(list);
      Py_XDECREF(object);
    }
  }
  if (list == NULL || receives) return list;
  Py_DECREF(list);
  Py_RETURN_NONE;
}

/* Return (received data, number of the call, this rank's frame) for Python, which raises its own errors. */
static PyObject *remaining_data(const object_call *call, received *all, uint64_t id) {
  if (PyErr_Occurred() != NULL && !PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
  PyErr_Clear();
  PyObject *array = part_of(all, all->data, (int64_t)all->bytes);
  if (array == NULL) return NULL;
  return Py_BuildValue("(NKO)", array, (unsigned long long)id, call->frame);
}

/* Return the library's call: with this rank's frame, or with FL_ANY if the frame is None. */
static plain_call call_of(const object_call *call) {
  static const int verbs[] = {FL_BROADCAST, FL_ALL_GATHER, FL_ALL_GATHER, FL_SCATTER};
  plain_call step;
  plain_begin(&step, verbs[call->verb - FL_BROADCAST_OBJECT]);
  fl_signature *s = &step.signature;
  s->part_of = 1 + call->verb - FL_BROADCAST_OBJECT;
  s->root = call->root;
  s->ndim = FL_ANY;
  if (call->sent == Py_None) return step;
  s->dtype = FL_UINT8;
  s->itemsize = 1;
  s->ndim = 1;
  s->count = s->shape[0] = bytes_of(call->sent) / (call->verb == FL_SCATTER_OBJECT ? call->binding->size : 1);
  step.data = data_of(call->sent);
  /* Withhold large data, like gather_small in backends/native.py. Then fetch() gathers the data of all ranks. */
  if (call->verb == FL_ALL_GATHER_OBJECT && !runs_here(call->binding, FL_ALL_GATHER, s->count)) s->count = 0;
  return step;
}

static fl_signature shown_of(const object_call *call) {
  const int64_t bytes = call->frame == Py_None ? 0 : bytes_of(call->frame);
  return (fl_signature){.verb = call->verb, .root = call->root, .ndim = FL_ANY, .count = bytes, .itemsize = 1};
}

/* Return the array for the received data if all ranks send as many bytes as this rank; NULL: exception. */
static PyObject *room_for(const object_call *call, plain_call *step) {
  PyObject *room = new_bytes(call->binding->size * bytes_of(call->sent));
  if (room == NULL) return NULL;
  step->room = (fl_room){data_of(room), (size_t)bytes_of(room)};
  step->output = &step->room;
  return room;
}

/* Return 1 if `op` received the data of all ranks. A rank that withholds its data sends its number of bytes. */
static int is_complete(const object_call *call, fl_op *op, size_t bytes) {
  if (!gathers(call)) return 1;
  const fl_signature *calls = call->binding->library.signatures(op);
  int64_t all = 0;
  for (int r = 0; r < call->binding->size; ++r) all += calls[r].shape[0];
  return (size_t)all == bytes;
}

/* Run the call and locate the received data; the root of a broadcast receives none. 0 with an exception. */
static int run(const object_call *call, received *all, recorded *entry) {
  Binding *binding = call->binding;
  plain_call step = call_of(call);
  const fl_signature shown = shown_of(call);
  PyObject *room = gathers(call) && binding->library.begin != NULL ? room_for(call, &step) : NULL;
  if (room == NULL && PyErr_Occurred() != NULL) return 0;
  fl_op *op;
  int has_run = run_in_steps(binding, &step, &shown, &op, entry);
  if (!has_run && PyErr_Occurred() == NULL) {
    step.output = NULL; /* the library may write to it later */
    Py_CLEAR(room);
    has_run = run_at_once(binding, &step, &shown, &op, entry);
  }
  if (!has_run) {
    Py_XDECREF(room);
    return 0;
  }
  if (op == NULL) {
    if (room != NULL) own_array(all, room);
    return 1;
  }
  Py_XDECREF(room);
  if (binding->library.wait(op, 0) == FL_OK) {
    all->data = binding->library.output(op, &all->bytes);
    if (is_complete(call, op, all->bytes)) {
      all->op = op;
      return 1;
    }
  }
  step.signature.verb = call->verb;
  if (!gathers(call) && is_root(call)) step.result = call->sent;
  PyObject *array = fetch(binding, op, call->sent, Py_None, &step, *entry);
  if (array != NULL) own_array(all, array);
  return array != NULL;
}

static PyObject *result_of(const object_call *call) {
  received all = {.binding = call->binding};
  recorded entry = {NULL, 0};
  PyObject *result = NULL;
  const int alone = is_alone(call->binding);
  const fl_signature shown = shown_of(call);
  if (alone) entry = record_alone(call->binding, &shown);
  if (alone || run(call, &all, &entry)) {
    if (call->verb == FL_BROADCAST_OBJECT && is_root(call) && call->sent != call->frame) { /* Python sends the rest */
      result = Py_BuildValue("(OKO)", call->sent, (unsigned long long)entry.id, call->frame);
    } else if (alone || (!gathers(call) && is_root(call))) {
      PyObject *own_object = call->object;
      if (call->verb == FL_SCATTER_OBJECT) own_object = PyList_GetItem(own_object, call->binding->rank);
      result = own_object == NULL ? NULL : PyList_New(1);
      if (result != NULL) PyList_SetItem(result, 0, Py_NewRef(own_object));
    } else {
      if (call->verb == FL_BROADCAST_OBJECT && entry.row->id == entry.id) entry.row->bytes = (int64_t)all.bytes;
      result = objects_of(call, &all);
      if (result == NULL) result = remaining_data(call, &all, entry.id);
    }
  }
  release(&all);
  if (entry.row != NULL) ring_end(entry.row, entry.id, result == NULL);
  return result;
}

/* Pickle this rank's data. 0: pickling failed, or Python must handle it. */
static int pickle_own(object_call *call) {
  if (!gathers(call) && !is_root(call)) {
    call->frame = Py_NewRef(Py_None);
  } else {
    call->frame = call->verb == FL_SCATTER_OBJECT ? frames_of(call->object, call->binding->size)
                                        : frame_of(call->object);
  }
  if (call->frame == NULL) return 0;
  const int64_t bytes = call->frame == Py_None ? 0 : bytes_of(call->frame);
  const int is_long = (call->verb == FL_GATHER_OBJECT && bytes > SHORT_BYTES) ||
                      (call->verb == FL_BROADCAST_OBJECT && !runs_here(call->binding, FL_BROADCAST, bytes));
  call->sent = is_long ? short_frame(call->frame) : Py_NewRef(call->frame);
  return call->sent != NULL;
}

PyObject *native_object(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  object_call call = {.binding = binding_of(self)};
  if (call.binding == NULL) return NULL;
  if (count != 3) return PyErr_Format(PyExc_TypeError, "expected (verb, object, root)");
  const int is_left = is_left_to_python(call.binding);
  if (is_left < 0) return NULL;
  if (is_left || !plain_int(args[0], FL_SCATTER_OBJECT, &call.verb) ||
      call.verb < FL_BROADCAST_OBJECT || !plain_int(args[2], call.binding->size - 1, &call.root)) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  call.object = args[1];
  PyObject *result = NULL;
  if (pickle_own(&call)) {
    result = result_of(&call);
  } else if (PyErr_Occurred() == NULL || PyErr_ExceptionMatches(PyExc_Exception)) {
    PyErr_Clear();
    result = Py_NewRef(Py_NotImplemented);
  }
  Py_XDECREF(call.frame);
  Py_XDECREF(call.sent);
  return result;
}
