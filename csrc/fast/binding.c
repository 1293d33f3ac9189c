/* Flight records with the line of user code: the innermost frame outside this package and its callers.

   It runs no Python code, so that no signal handler can raise inside a collective. Exception: a new line is
   looked up in Python before a call begins. */

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

enum { NAMELESS = 2 }; /* contextlib, the second of the folders */

/* Return the number, from 1, of the package or library folder that contains `code`; 0: it is user code. */
static int is_ours(Binding *binding, PyObject *code) {
  known_code *known = &binding->codes[(uintptr_t)code / 64 % CODES];
  if (known->code == code) return known->is_ours;
  PyObject *file = PyObject_GetAttr(code, name_file), *before = known->code;
  if (file == NULL) return 0;
  known->is_ours = 0;
  for (Py_ssize_t i = 0; i < PyTuple_Size(binding->folders) && !known->is_ours; ++i) {
    PyObject *folder = PyTuple_GetItem(binding->folders, i);
    if (PyUnicode_Tailmatch(file, folder, 0, PY_SSIZE_T_MAX, -1) > 0) known->is_ours = (int)i + 1;
  }
  Py_INCREF(code);
  known->code = code;
  Py_XDECREF(before);
  Py_DECREF(file);
  return known->is_ours;
}

/* The caller of this package: code and instruction of the user, and the package code that was called. */
typedef struct {
  PyObject *code, *instruction, *via; /* references; `via` may be NULL */
} caller;

static void release(caller *one) {
  Py_CLEAR(one->code);
  Py_CLEAR(one->instruction);
  Py_CLEAR(one->via);
}

/* Find the caller; 0 with an exception. Without user code, as on a library's thread: the outermost frame. */
static int find_caller(Binding *binding, caller *found) {
  PyObject *frame = (PyObject *)PyEval_GetFrame();
  *found = (caller){NULL, NULL, NULL};
  if (frame == NULL) { /* called from C, such as atexit */
    found->code = PyObject_GetAttrString(binding->here, "__code__");
    found->instruction = found->code == NULL ? NULL : PyLong_FromLong(0);
  }
  Py_XINCREF(frame);
  while (frame != NULL) {
    found->code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
    const int ours = is_ours(binding, found->code);
    PyObject *back = ours ? PyObject_GetAttr(frame, name_back) : NULL;
    if (back == Py_None) Py_CLEAR(back);
    if (back == NULL) {
      if (!PyErr_Occurred()) found->instruction = PyObject_GetAttr(frame, name_instruction);
      break;
    }
    if (ours == NAMELESS) {
      Py_DECREF(found->code);
    } else {
      Py_XDECREF(found->via);
      found->via = found->code;
    }
    found->code = NULL;
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  if (found->instruction != NULL) return 1;
  release(found);
  return 0;
}

static PyObject *make_place(const caller *one) {
  PyObject *name = called_verb == NULL ? Py_None : called_verb;
  if (one->via == NULL) {
    Py_INCREF(name);
  } else {
    name = PyObject_GetAttr(one->via, name_function);
  }
  PyObject *place = name == NULL ? NULL : PyTuple_Pack(3, one->code, one->instruction, name);
  Py_XDECREF(name);
  return place;
}

static int look_up(Binding *binding, known_site *known, const caller *one) {
  PyObject *place = make_place(one);
  PyObject *address = place == NULL ? NULL : PyObject_CallFunction(binding->here, NULL);
  if (address == NULL) {
    Py_XDECREF(place);
    return 0;
  }
  known->site = PyLong_AsVoidPtr(address);
  Py_DECREF(address);
  PyObject *before = known->place;
  known->place = place;
  known->code = one->code; /* kept alive by the place */
  known->instruction = PyLong_AsLong(one->instruction);
  Py_XDECREF(before);
  return known->site != NULL;
}

int place_and_site(Binding *binding, PyObject **place, const fl_site **site) {
  caller one;
  if (!find_caller(binding, &one)) return 0;
  const long number = PyLong_AsLong(one.instruction);
  known_site *known = &binding->sites[((uintptr_t)one.code / 64 + (uintptr_t)number / 2) % SITES];
  const int is_known = known->place != NULL && known->code == one.code && known->instruction == number;
  const int is_found = is_known || look_up(binding, known, &one);
  *place = known->place;
  *site = known->site;
  release(&one);
  return is_found;
}

/* Store the line of a call. `place` is an owned reference, or NULL with an exception. */
static void set_place(const Binding *binding, ring_call *row, PyObject *place) {
  if (place != NULL && PyList_SetItem(binding->notes, row - binding->calls->calls, place) == 0) {
    row->flags |= FL_RECORDED_PLACED;
  } else {
    PyErr_Clear();
  }
}

recorded record(const Binding *binding, const fl_signature *signature, int peer, int flags,
                PyObject *place) {
  ring_call *row = ring_begin(binding->calls, signature, peer, flags);
  if (place != NULL) {
    Py_INCREF(place);
    set_place(binding, row, place);
  }
  return (recorded){row, row->id};
}

void note_place(Binding *binding, ring_call *row) {
  caller one;
  set_place(binding, row, find_caller(binding, &one) ? make_place(&one) : NULL);
  release(&one);
}

int is_left_to_python(const Binding *binding) {
  if (binding->calls->off || PyList_Size(binding->first) != 0 || PyObject_Size(binding->dropped) != 0) return 1;
  const unsigned long thread = PyThread_get_thread_ident();
  for (int i = 0; i < CALLERS; ++i) {
    if (binding->calls->callers[i] == thread) return 1;
  }
  if (PySet_Size(binding->inside) == 0) return 0;
  PyObject *number = PyLong_FromUnsignedLong(thread);
  const int is_inside = number == NULL ? -1 : PySet_Contains(binding->inside, number);
  Py_XDECREF(number);
  return is_inside;
}

int is_hurried(const Binding *binding, uint64_t before, int64_t now) {
  enum { FIRST_CALLS = 2000, SOON_TICKS = 50000 };
  const ring *calls = binding->calls;
  return calls->number >= FIRST_CALLS && now - calls->calls[(before - 1) % FL_RECORDED_CALLS].started < SOON_TICKS;
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
  const int is_added = number != NULL && PySet_Add(binding->inside, number) == 0;
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
  if (number == NULL || PySet_Discard(binding->inside, number) < 0) PyErr_Clear();
  Py_XDECREF(number);
  PyErr_Restore(type, value, trace);
}
