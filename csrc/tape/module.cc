// flashlight_py._native._tape: what a captured step needs in native code.

#include "guards.h"

namespace {

PyObject* hold(PyObject*, PyObject* guards) {
  const int answer = guards_hold(guards);
  return answer < 0 ? nullptr : PyBool_FromLong(answer);
}

PyObject* same(PyObject*, PyObject* args) {
  PyObject *before, *after;
  if (!PyArg_ParseTuple(args, "OO", &before, &after)) return nullptr;
  const int answer = guards_same(before, after);
  return answer < 0 ? nullptr : PyBool_FromLong(answer);
}

PyObject* offset(PyObject*, PyObject* args) {
  PyObject *object, *descriptor, *marker;
  if (!PyArg_ParseTuple(args, "OOO", &object, &descriptor, &marker)) return nullptr;
  const Py_ssize_t found = guards_offset(object, descriptor, marker);
  return found < 0 ? nullptr : PyLong_FromSsize_t(found);
}

PyMethodDef methods[] = {
    {"guards", guards_new, METH_O, "guards(entries): an object that keeps the state of containers."},
    {"hold", hold, METH_O, "hold(guards): whether all is as it was."},
    {"same", same, METH_VARARGS, "same(before, after): whether two values are the same."},
    {"offset", offset, METH_VARARGS, "offset(object, descriptor, marker): where it is, in bytes."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_tape", nullptr, -1, methods,
                          nullptr,               nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__tape() { return PyModule_Create(&definition); }
