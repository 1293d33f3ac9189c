#include "guards.h"

#include <cstring>

namespace fl::tape {
namespace {

size_t cell_offset = 0;

// Objects that are equal where their values are, and cost nothing to compare.
bool is_value(PyObject* object) {
  return PyLong_Check(object) || PyFloat_Check(object) || PyUnicode_Check(object) ||
         PyBytes_Check(object) || PyComplex_Check(object) || PyTuple_Check(object);
}

bool is_empty_container(PyObject* object) {
  return (PyList_Check(object) || PyDict_Check(object)) && PyObject_Size(object) == 0;
}

}  // namespace

bool Guards::find_cells() {
  // A cell with a mark in it, from a function that closes over its argument.
  Owned globals(PyDict_New()), mark(PyList_New(0));
  if (globals == nullptr || mark == nullptr) return false;
  Owned types(PyImport_ImportModule("types"));
  Owned type(types == nullptr ? nullptr : PyObject_GetAttrString(types.get(), "CellType"));
  Owned cell(type == nullptr ? nullptr : PyObject_CallFunctionObjArgs(type.get(), mark.get(), nullptr));
  Owned basic(type == nullptr ? nullptr : PyObject_GetAttrString(type.get(), "__basicsize__"));
  if (cell == nullptr || basic == nullptr) return false;
  const size_t size = PyLong_AsSize_t(basic.get());
  for (size_t at = sizeof(PyObject); at + sizeof(PyObject*) <= size; at += sizeof(PyObject*)) {
    PyObject* found;
    std::memcpy(&found, reinterpret_cast<char*>(cell.get()) + at, sizeof found);
    if (found == mark.get()) cell_offset = at;
  }
  if (cell_offset == 0) PyErr_SetString(PyExc_SystemError, "cells hold their contents elsewhere");
  return cell_offset != 0;
}

bool Guards::read(PyObject* entries, PyObject* anything) {
  for (Py_ssize_t i = 0; i < PyList_Size(entries); ++i) {
    PyObject *container, *key, *values;
    int kind;
    if (!PyArg_ParseTuple(PyList_GetItem(entries, i), "iOOO!", &kind, &container, &key, &PyTuple_Type,
                          &values)) {
      return false;
    }
    entries_.emplace_back();
    Entry& entry = entries_.back();
    entry.kind = static_cast<Kind>(kind);
    entry.container = share(container);
    entry.key = share(key);
    for (Py_ssize_t k = 0; k < PyTuple_Size(values); ++k) {
      PyObject* value = PyTuple_GetItem(values, k);
      entry.values.push_back(value == anything ? Owned() : share(value));
    }
    if (entry.kind == SLOT && !Slots::named(key, &entry.slot)) return false;
  }
  return true;
}

int Guards::compare(PyObject* now, Owned& before) {
  if (now == before.get() || before == nullptr) return 1;
  if (now == nullptr || Py_TYPE(now) != Py_TYPE(before.get())) return 0;
  // Not remembered: the new one may be filled, and nobody would look into it.
  if (is_empty_container(now) && is_empty_container(before.get())) return 1;
  if (!is_value(now)) return 0;
  const int same = PyObject_RichCompareBool(now, before.get(), Py_EQ);
  if (same == 1) before = share(now);
  return same;
}

int Guards::holds_dict(Entry& entry) const {
  PyObject* dict = entry.container.get();
  if (static_cast<size_t>(PyDict_Size(dict)) != entry.values.size()) return 0;
  PyObject *key, *value;
  Py_ssize_t position = 0;
  for (Owned& before : entry.values) {
    if (!PyDict_Next(dict, &position, &key, &value)) return 0;
    const int same = compare(value, before);
    if (same != 1) return same;
  }
  return 1;
}

int Guards::holds(Entry& entry) const {
  PyObject* container = entry.container.get();
  switch (entry.kind) {
    case DICT:
      return holds_dict(entry);
    case ITEMS:
      if (static_cast<size_t>(PyList_Size(container)) != entry.values.size()) return 0;
      for (size_t i = 0; i < entry.values.size(); ++i) {
        const int same = compare(PyList_GetItem(container, static_cast<Py_ssize_t>(i)), entry.values[i]);
        if (same != 1) return same;
      }
      return 1;
    case CELL: {
      PyObject* now;
      std::memcpy(&now, reinterpret_cast<char*>(container) + cell_offset, sizeof now);
      return compare(now, entry.values[0]);
    }
    case GLOBAL: {
      PyObject* now = PyDict_GetItemWithError(container, entry.key.get());
      if (now == nullptr && PyErr_Occurred()) return -1;
      return compare(now, entry.values[0]);
    }
    case SLOT:
      return compare(slots.get(container, entry.slot), entry.values[0]);
    case LENGTH: {
      const Py_ssize_t length = PyObject_Size(container);
      return length < 0 ? -1 : length == PyLong_AsSsize_t(entry.values[0].get());
    }
  }
  return 0;
}

int Guards::hold() {
  for (Entry& entry : entries_) {
    const int same = holds(entry);
    if (same != 1) return same;
  }
  return 1;
}

}  // namespace fl::tape
