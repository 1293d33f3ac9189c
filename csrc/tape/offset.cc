// Where a slot lies: the limited API does not say.

#include <cstring>

#include "guards.h"

Py_ssize_t guards_offset(PyObject* object, PyObject* descriptor, PyObject* marker) {
  PyTypeObject* type = Py_TYPE(descriptor);
  auto get = reinterpret_cast<descrgetfunc>(PyType_GetSlot(type, Py_tp_descr_get));
  auto set = reinterpret_cast<descrsetfunc>(PyType_GetSlot(type, Py_tp_descr_set));
  PyObject* basic = PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)),
                                           "__basicsize__");
  const Py_ssize_t size = basic == nullptr ? -1 : PyLong_AsSsize_t(basic);
  Py_XDECREF(basic);
  if (get == nullptr || set == nullptr || size < 0) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "guards_offset: no data descriptor");
    return -1;
  }
  PyObject* before = get(descriptor, object, reinterpret_cast<PyObject*>(Py_TYPE(object)));
  if (before == nullptr) {  // nothing is there
    if (!PyErr_ExceptionMatches(PyExc_AttributeError) && !PyErr_ExceptionMatches(PyExc_ValueError)) {
      return -1;
    }
    PyErr_Clear();
  }
  if (set(descriptor, object, marker) < 0) {
    Py_XDECREF(before);
    return -1;
  }
  Py_ssize_t found = -1;
  for (Py_ssize_t offset = sizeof(PyObject); offset + Py_ssize_t{sizeof before} <= size;
       offset += sizeof before) {
    PyObject* there;
    std::memcpy(&there, reinterpret_cast<const char*>(object) + offset, sizeof there);
    if (there == marker) found = offset;
  }
  const int restored = set(descriptor, object, before);
  Py_XDECREF(before);
  if (restored < 0) return -1;
  if (found < 0) PyErr_SetString(PyExc_TypeError, "guards_offset: the attribute is not in memory");
  return found;
}
