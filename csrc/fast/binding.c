/* Flight records, each with the line of user code: the innermost frame that is neither in this package nor in
   a library that calls it.

   This file runs no Python code, so that no signal handler can raise inside a collective. Only one thing runs
   Python: a line that is not in the cache is looked up before the call begins. */

#include "binding.h"

enum { CALLERS = sizeof((ring *)0)->callers / sizeof *((ring *)0)->callers };

_Thread_local PyObject *called_verb;

static PyObject *name_back, *name_file, *name_function, *name_instruction;

int binding_names(void) {
  name_back = PyUnicode_InternFromString("f_back");
  name_file = PyUnicode_InternFromString("co_filename");
  name_function = PyUnicode_InternFromString("co_name");
  name_instruction = PyUnicode_InternFromString("f_lasti");
  return name_back && name_file && name_function && name_instruction;
}

enum { NAMELESS = 2 }; /* number, from 1, of contextlib in `folders` */

/* Return the number, from 1, of the package or library folder that contains `code`; 0: it is user code. */
static int is_ours(Binding *binding, PyObject *code) {
  cached_code *cached = &binding->codes[(uintptr_t)code / 64 % CODES];
  if (cached->code == code) return cached->is_ours;
  PyObject *file = PyObject_GetAttr(code, name_file), *previous = cached->code;
  if (file == NULL) return 0;
  cached->is_ours = 0;
  for (Py_ssize_t i = 0; i < PyTuple_Size(binding->folders) && !cached->is_ours; ++i) {
    PyObject *folder = PyTuple_GetItem(binding->folders, i);
    if (PyUnicode_Tailmatch(file, folder, 0, PY_SSIZE_T_MAX, -1) > 0) cached->is_ours = (int)i + 1;
  }
  cached->code = Py_NewRef(code);
  Py_XDECREF(previous);
  Py_DECREF(file);
  return cached->is_ours;
}

/* The caller of this package: code and instruction of the user, and the package code that was called. */
typedef struct {
  PyObject *code, *instruction, *via; /* references; `via` may be NULL */
} caller;

static void release(caller *site_caller) {
  Py_CLEAR(site_caller->code);
  Py_CLEAR(site_caller->instruction);
  Py_CLEAR(site_caller->via);
}

/* Find the caller; 0 with an exception. Without user code, as on a library's thread: the outermost frame. */
static int find_caller(Binding *binding, caller *result) {
  PyObject *frame = (PyObject *)PyEval_GetFrame();
  *result = (caller){NULL, NULL, NULL};
  if (frame == NULL) { /* called from C, such as atexit */
    result->code = PyObject_GetAttrString(binding->here, "__code__");
    result->instruction = result->code == NULL ? NULL : PyLong_FromLong(0);
  }
  Py_XINCREF(frame);
  while (frame != NULL) {
    result->code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
    const int ours = is_ours(binding, result->code);
    PyObject *back = ours ? PyObject_GetAttr(frame, name_back) : NULL;
    if (back == Py_None) Py_CLEAR(back);
    if (back == NULL) {
      if (!PyErr_Occurred()) result->instruction = PyObject_GetAttr(frame, name_instruction);
      break;
    }
    if (ours == NAMELESS) {
      Py_DECREF(result->code);
    } else {
      Py_XDECREF(result->via);
      result->via = result->code;
    }
    result->code = NULL;
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  if (result->instruction != NULL) return 1;
  release(result);
  return 0;
}

static PyObject *make_place(const caller *site_caller) {
  PyObject *const via = site_caller->via, *const verb = called_verb == NULL ? Py_None : called_verb;
  PyObject *name = via == NULL ? Py_NewRef(verb) : PyObject_GetAttr(via, name_function);
  PyObject *place = name == NULL ? NULL : PyTuple_Pack(3, site_caller->code, site_caller->instruction, name);
  Py_XDECREF(name);
  return place;
}

static int look_up(Binding *binding, cached_site *cached, const caller *site_caller) {
  PyObject *place = make_place(site_caller);
  PyObject *address = place == NULL ? NULL : PyObject_CallFunction(binding->here, NULL);
  if (address == NULL) {
    Py_XDECREF(place);
    return 0;
  }
  cached->site = PyLong_AsVoidPtr(address);
  Py_DECREF(address);
  PyObject *previous = cached->place;
  cached->place = place;
  cached->code = site_caller->code; /* the place keeps it alive */
  cached->instruction = PyLong_AsLong(site_caller->instruction);
  Py_XDECREF(previous);
  return cached->site != NULL;
}

int place_and_site(Binding *binding, PyObject **place, const fl_site **site) {
  caller site_caller;
  if (!find_caller(binding, &site_caller)) return 0;
  const long number = PyLong_AsLong(site_caller.instruction);
  cached_site *cached = &binding->sites[((uintptr_t)site_caller.code / 64 + (uintptr_t)number / 2) % SITES];
  const int is_known = cached->place != NULL && cached->code == site_caller.code && cached->instruction == number;
  const int is_available = is_known || look_up(binding, cached, &site_caller);
  *place = cached->place;
  *site = cached->site;
  release(&site_caller);
  return is_available;
}

/* Store the line of a call. `place` is an owned reference, or NULL with an exception. */
static void set_place(const Binding *binding, ring_call *row, PyObject *place) {
  if (place != NULL && PyList_SetItem(binding->notes, row - binding->calls->calls, place) == 0) {
    row->flags |= FL_RECORDED_PLACED;
  } else {
    PyErr_Clear();
  }
}

recorded record(const Binding *binding, const fl_signature *signature, int peer, int flags, PyObject *place) {
  ring_call *row = ring_begin(binding->calls, signature, peer, flags);
  if (place != NULL) set_place(binding, row, Py_NewRef(place));
  return (recorded){row, row->id};
}

void note_place(Binding *binding, ring_call *row) {
  caller site_caller;
  set_place(binding, row, find_caller(binding, &site_caller) ? make_place(&site_caller) : NULL);
  release(&site_caller);
}

int is_left_to_python(const Binding *binding) {
  if (binding->calls->off || PyList_Size(binding->first) != 0 || PyObject_Size(binding->dropped) != 0) return 1;
  const unsigned long thread = PyThread_get_thread_ident();
  for (int i = 0; i < CALLERS; ++i) {
    if (binding->calls->callers[i] == thread) return 1;
  }
  if (PySet_Size(binding->threads) == 0) return 0;
  PyObject *number = PyLong_FromUnsignedLong(thread);
  const int is_inside = number == NULL ? -1 : PySet_Contains(binding->threads, number);
  Py_XDECREF(number);
  return is_inside;
}

int is_hurried(const Binding *binding, uint64_t previous, int64_t now) {
  enum { FIRST_CALLS = 2000, SOON_TICKS = 50000 };
  const ring *calls = binding->calls;
  return calls->number >= FIRST_CALLS && now - calls->calls[(previous - 1) % FL_RECORDED_CALLS].started < SOON_TICKS;
}

recorded record_alone(Binding *binding, const fl_signature *shown) {
  const recorded made = record(binding, shown, -1, 0, NULL);
  if (!is_hurried(binding, made.id - 1, made.row->started)) note_place(binding, made.row);
  return made;
}

int enter(const Binding *binding) {
  const unsigned long thread = PyThread_get_thread_ident();
  for (int i = 1; i < CALLERS; ++i) {
    if (binding->calls->callers[i] != 0) continue;
    binding->calls->callers[i] = thread;
    return i;
  }
  PyObject *number = PyLong_FromUnsignedLong(thread);
  const int is_added = number != NULL && PySet_Add(binding->threads, number) == 0;
  Py_XDECREF(number);
  return is_added ? CALLERS : -1;
}

void leave(const Binding *binding, int place) {
  if (place < CALLERS) {
    binding->calls->callers[place] = 0;
    return;
  }
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyObject *number = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
  if (number == NULL || PySet_Discard(binding->threads, number) < 0) PyErr_Clear();
  Py_XDECREF(number);
  PyErr_Restore(type, value, trace);
}
