/* The line of user code that called: the innermost frame outside this package.

   Runs no Python code, so that no signal handler can raise in the middle of a collective. */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

static PyObject *name_back, *name_code, *name_file, *name_function, *name_instruction;

static int place_names(void) {
  name_back = PyUnicode_InternFromString("f_back");
  name_code = PyUnicode_InternFromString("f_code");
  name_file = PyUnicode_InternFromString("co_filename");
  name_function = PyUnicode_InternFromString("co_name");
  name_instruction = PyUnicode_InternFromString("f_lasti");
  return name_back && name_code && name_file && name_function && name_instruction;
}

/* Whether the code of `frame`, a new reference in *code, lies in the folder `package`. */
static int place_is_ours(PyObject *frame, PyObject *package, PyObject **code) {
  *code = PyObject_GetAttr(frame, name_code);
  PyObject *file = *code == NULL ? NULL : PyObject_GetAttr(*code, name_file);
  const int ours = file == NULL ? 0 : (int)PyUnicode_Tailmatch(file, package, 0, PY_SSIZE_T_MAX, -1);
  Py_XDECREF(file);
  return ours > 0;
}

/* (code, instruction, name of our function that it called), or NULL with an exception. */
static PyObject *place_of_caller(PyObject *package) {
  PyObject *frame = (PyObject *)PyEval_GetFrame();
  PyObject *code = NULL, *via = NULL, *place = NULL;
  Py_XINCREF(frame);
  while (frame != NULL && frame != Py_None && place_is_ours(frame, package, &code)) {
    PyObject *back = PyObject_GetAttr(frame, name_back);
    Py_XDECREF(via);
    via = PyObject_GetAttr(code, name_function);
    Py_DECREF(code);
    code = NULL;
    Py_DECREF(frame);
    frame = back;
  }
  PyObject *instruction = code == NULL ? NULL : PyObject_GetAttr(frame, name_instruction);
  if (instruction != NULL) place = PyTuple_Pack(3, code, instruction, via == NULL ? Py_None : via);
  Py_XDECREF(instruction);
  Py_XDECREF(via);
  Py_XDECREF(code);
  Py_XDECREF(frame);
  return place;
}
