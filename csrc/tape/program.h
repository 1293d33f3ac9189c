// A captured step: its instructions, and what ties them to Python.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL flashlight_tape
#ifndef FL_TAPE_MODULE
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>
#include <numpy/ufuncobject.h>

#include <memory>
#include <utility>
#include <vector>

#include "tape.h"

namespace fl::tape {

struct Release {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;

inline Owned share(PyObject* object) {
  Py_XINCREF(object);
  return Owned(object);
}

// The slots of variables, which the limited API reaches by name alone, in some 30 ns each.
class Slots {
 public:
  enum Name { DATA, GRAD, NODE, HOOK, BUFFER, PLACEMENT, CALC_GRAD, COUNT };

  // They lie at `offsets` in instances of `type`; false with an exception.
  bool use(PyObject* type, PyObject* offsets);
  bool is_instance(PyObject* object) const {
    return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type_.get();
  }
  PyObject* get(PyObject* variable, Name name) const { return *at(variable, name); }  // borrowed
  void set(PyObject* variable, Name name, PyObject* value) const;
  // A new variable of `array`, which it takes over.
  PyObject* make(Owned array, PyObject* calc_grad, PyObject* node) const;

 private:
  PyObject** at(PyObject* variable, Name name) const {
    return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(variable) + offsets_[name]);
  }
  Owned type_;
  size_t offsets_[COUNT] = {};
};

extern Slots slots;

// An argument of the step: an array or a variable of one, or a value that has to be equal.
struct Argument {
  enum Kind { ARRAY, VARIABLE, VALUE } kind;
  int type;
  std::vector<npy_intp> shape;
  char* cell;  // where it is copied to; null: it is used where it lies
  PyObject* value;
  bool is_writeable;
};

// What a step returns.
struct Result {
  enum Kind { CONSTANT, ARRAY, VARIABLE, NUMBER, SCALAR, ARGUMENT, TUPLE, LIST, DICT } kind;
  PyObject* object = nullptr;  // the constant, or the keys
  PyObject* node = nullptr;    // of a variable that has a history
  int at = 0, type = 0;
  std::vector<npy_intp> shape, strides;  // no strides: contiguous
  std::vector<Result> parts;
};

class Program {
 public:
  // From what flashlight_py/tape/program.py describes; null with an exception.
  static std::unique_ptr<Program> read(PyObject* description);

  // Whether the step was captured for such arguments: 1 or 0, -1 with an exception.
  int fits(PyObject* args, PyObject* kwargs);
  // What the step returns; null with an exception, or where it has to be left (`is_left`).
  PyObject* replay(PyObject* args, PyObject* kwargs, bool* is_left);
  bool is_busy() const { return is_busy_; }
  PyObject* description() const { return description_.get(); }  // borrowed
  int64_t instructions() const { return static_cast<int64_t>(instructions_.size()); }

 private:
  struct Place {  // an entry of the table that begins in an argument
    size_t entry, argument;
    npy_intp offset;
  };
  struct Binding {
    PyObject *variable, *value;
    Slots::Name slot;
  };

  bool read_arguments(PyObject* described);
  bool read_table(PyObject* described);
  bool read_instructions(PyObject* described);
  bool read_bindings(PyObject* described);
  bool read_result(PyObject* described, Result* to);
  bool read_occupied(PyObject* described);
  PyObject* given(PyObject* args, PyObject* kwargs, size_t number) const;  // borrowed
  bool are_apart(PyObject* args, PyObject* kwargs) const;
  bool set_arguments(PyObject* args, PyObject* kwargs);
  Outcome run();
  PyObject* build(const Result& result, PyObject* args, PyObject* kwargs) const;
  PyObject* build_array(const Result& result) const;

  std::vector<Argument> arguments_;
  std::vector<PyObject*> names_;  // of the arguments that are passed by name, which come last
  std::vector<char*> table_;
  std::vector<Place> places_;
  // What the step writes to, or reads where it writes to arguments: begin and end, in order.
  std::vector<std::pair<const char*, const char*>> occupied_;
  Instructions instructions_;
  std::vector<Binding> bindings_;
  Result result_;
  Owned description_;  // which keeps all objects that are referred to here
  PyObject* guards_ = nullptr;
  bool is_busy_ = false, is_large_ = false;
};

// An instruction as flashlight_py/tape/program.py describes it, which keeps its objects; null with an
// exception.
std::unique_ptr<Instruction> read_instruction(PyObject* described);

}  // namespace fl::tape
