// Whether Python state is as it was, in a few nanoseconds per value.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

// Returns a new object that keeps `entries`, a sequence of tuples, each the state of one container:
//
//   ("whole", owner, dict, keys, values)        exactly these items in this order; it is the __dict__
//                                               of `owner`, whose class is the same, unless None
//   ("named", owner, dict, keys, values, size)  these items; how many it has, or -1 for any number
//   ("absent", dict, keys)                      none of these
//   ("list", list, positions, values, size)     these items, and how many it has
//   ("items", object, values)                   what iteration over it yields
//   ("length", object, size)                    how many items it has, and nothing of them
//   ("slots", object, offsets, values)          what is in its memory, at offsets in bytes
//   ("empty", object, offsets)                  nothing is there
//
// keys, positions, values and offsets are tuples. Null with an exception where they are not.
PyObject* guards_new(PyObject* module, PyObject* entries);

// Returns 1 where all is as it was, 0 where something differs, -1 with an exception. A value that is
// another object is as it was if same() says so, and is remembered: the next call is fast again.
// Of Python code it calls only the iterators of "items".
int guards_hold(PyObject* guards);

// Returns 1 where `after` is of the same type and value as `before`, bit for bit, 0 where not, -1 with
// an exception. By value are compared numbers, str, bytes, slices, ranges, dtypes, NumPy's scalars and
// tuples, item by item; all else is the same only if it is the same object.
int guards_same(PyObject* before, PyObject* after);

// Returns where in the memory of `object` the attribute lies that `descriptor` sets, in bytes, or -1
// with an exception. It is set to `marker`, which must be referred to from nowhere else, found there,
// and set back.
Py_ssize_t guards_offset(PyObject* object, PyObject* descriptor, PyObject* marker);
