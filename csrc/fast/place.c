/* The line of user code that called: the innermost frame outside this package and what calls it.

   Runs no Python code, so that no signal handler can raise in the middle of a collective; but to put a
   new line into words, before one begins. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define NO_IMPORT_ARRAY
#define PY_ARRAY_UNIQUE_SYMBOL flashlight_fast
#include <numpy/arrayobject.h>

#include "binding.h"

static PyObject *name_back, *name_file, *name_function, *name_instruction;

int place_names(void) {
  name_back = PyUnicode_InternFromString("f_back");
  name_file = PyUnicode_InternFromString("co_filename");
  name_function = PyUnicode_InternFromString("co_name");
  name_instruction = PyUnicode_InternFromString("f_lasti");
  return name_back && name_file && name_function && name_instruction;
}

enum { NAMELESS = 2 }; /* code of contextlib, the second of the folders */

/* In which of the folders of the package and of libraries that call it `code` lies, from 1 on; 0: in none. */
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

/* The frame of the caller and its code, new references; and the code that it called. A thread of a library
   may have called, in which no code is the user's: then it is the outermost frame. */
static PyObject *frame_of_caller(Binding *binding, PyObject **code, PyObject **via) {
  PyObject *frame = (PyObject *)PyEval_GetFrame();
  *code = *via = NULL;
  Py_XINCREF(frame);
  while (frame != NULL) {
    *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
    const int ours = is_ours(binding, *code);
    PyObject *back = ours ? PyObject_GetAttr(frame, name_back) : NULL;
    if (back == Py_None) Py_CLEAR(back);
    if (back == NULL && !PyErr_Occurred()) return frame;
    if (ours != NAMELESS) {
      Py_XDECREF(*via);
      *via = *code;
    } else {
      Py_DECREF(*code);
    }
    *code = NULL;
    Py_DECREF(frame);
    frame = back;
  }
  Py_CLEAR(*via);
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "nobody has called");
  return NULL;
}

static PyObject *make_place(PyObject *code, PyObject *instruction, PyObject *via) {
  PyObject *name = via == NULL ? NULL : PyObject_GetAttr(via, name_function);
  if (via != NULL && name == NULL) return NULL;
  PyObject *place = PyTuple_Pack(3, code, instruction, name == NULL ? Py_None : name);
  Py_XDECREF(name);
  return place;
}

PyObject *place_of_caller(Binding *binding) {
  PyObject *code, *via, *place = NULL;
  PyObject *frame = frame_of_caller(binding, &code, &via);
  if (frame == NULL) return NULL;
  PyObject *instruction = PyObject_GetAttr(frame, name_instruction);
  if (instruction != NULL) place = make_place(code, instruction, via);
  Py_XDECREF(instruction);
  Py_XDECREF(via);
  Py_DECREF(code);
  Py_DECREF(frame);
  return place;
}

static int look_up(Binding *binding, known_site *known, PyObject *code, PyObject *instruction,
                   PyObject *via) {
  PyObject *place = make_place(code, instruction, via);
  PyObject *address = place == NULL ? NULL : PyObject_CallFunction(binding->here, NULL);
  if (address == NULL) {
    Py_XDECREF(place);
    return 0;
  }
  known->site = PyLong_AsVoidPtr(address);
  Py_DECREF(address);
  PyObject *before = known->place;
  known->place = place;
  known->code = code; /* which the place keeps */
  known->instruction = PyLong_AsLong(instruction);
  Py_XDECREF(before);
  return known->site != NULL;
}

int place_and_site(Binding *binding, PyObject **place, const fl_site **site) {
  PyObject *code, *via;
  PyObject *frame = frame_of_caller(binding, &code, &via);
  if (frame == NULL) return 0;
  PyObject *instruction = PyObject_GetAttr(frame, name_instruction);
  const long number = instruction == NULL ? 0 : PyLong_AsLong(instruction);
  known_site *known = &binding->sites[((uintptr_t)code / 64 + (uintptr_t)number / 2) % SITES];
  const int is_known = known->place != NULL && known->code == code && known->instruction == number;
  const int found = instruction != NULL && (is_known || look_up(binding, known, code, instruction, via));
  if (found) {
    *place = known->place;
    *site = known->site;
  }
  Py_XDECREF(instruction);
  Py_XDECREF(via);
  Py_DECREF(code);
  Py_DECREF(frame);
  return found;
}
