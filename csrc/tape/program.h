// A captured step: its instructions and their connection to Python.
#pragma once

#include "../common/numpy.h"

#include <numpy/ufuncobject.h>

#include <utility>
#include <vector>

#include "tape.h"

namespace fl::tape {

// Read one field of a description tuple: an object (borrowed), array, address or number.
inline bool take(PyObject* item, PyObject** field) {
  *field = item;
  return true;
}
inline bool take(PyObject* item, PyArrayObject** field) {
  *field = item == Py_None ? nullptr : reinterpret_cast<PyArrayObject*>(item);
  return *field == nullptr || PyArray_Check(item);
}
inline bool take(PyObject* item, const char** field) {
  *field = static_cast<const char*>(PyLong_AsVoidPtr(item));
  return PyErr_Occurred() == nullptr;
}
template <typename Field>
bool take(PyObject* item, Field* field) {
  *field = static_cast<Field>(PyLong_AsLongLong(item));
  return PyErr_Occurred() == nullptr;
}

// Read all fields from index `first`; false with an exception.
template <typename... Fields>
bool read(PyObject* described, Py_ssize_t first, Fields*... fields) {
  const Py_ssize_t count = PyTuple_Check(described) ? PyTuple_Size(described) : -1;
  if (count == first + static_cast<Py_ssize_t>(sizeof...(fields)) &&
      (take(PyTuple_GetItem(described, first++), fields) && ...)) {
    return true;
  }
  if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "invalid description: %R", described);
  return false;
}

// Call `read_one` with each item of a tuple or list; false with an exception.
template <typename Read>
bool read_each(PyObject* described, Read read_one) {
  const Owned items(PySequence_Tuple(described));
  for (Py_ssize_t i = 0; items != nullptr && i < PyTuple_Size(items.get()); ++i) {
    if (!read_one(PyTuple_GetItem(items.get(), i))) return false;
  }
  return items != nullptr;
}

// For each tuple in `described`, append an item whose `fields` are the items of the tuple. False: exception.
template <auto... fields, typename Item>
bool read_all(PyObject* described, std::vector<Item>* to) {
  return read_each(described, [to](PyObject* element) {
    to->emplace_back();
    return read(element, 0, &(to->back().*fields)...);
  });
}

// Reads and writes attributes of variables through descriptors, because access by name takes some 30 ns.
class Slots {
 public:
  enum Name { DATA, GRAD, NODE, HOOK, BUFFER, PLACEMENT, CHANGED, CALC_GRAD, COUNT };

  // `descriptors`: descriptors of the slots of `type`, in the order of Name. False with an exception.
  bool use(PyObject* type, PyObject* descriptors);
  bool is_instance(PyObject* object) const {
    return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type_;
  }
  Owned get(PyObject* variable, Name name) const;
  void set(PyObject* variable, Name name, PyObject* value) const;
  PyObject* make(Owned array, PyObject* calc_grad, PyObject* node) const;

 private:
  PyObject *type_ = nullptr, *descriptors_ = nullptr, *zero_ = nullptr;  // never freed
  descrgetfunc read_ = nullptr;
  descrsetfunc write_ = nullptr;
};

extern Slots slots;

// Return an array at `data` with the dtype, shape and strides of `like`; null with an exception.
inline PyObject* array_at(PyArrayObject* like, char* data) {
  PyArray_Descr* kind = PyArray_DESCR(like);
  Py_INCREF(kind);
  return PyArray_NewFromDescr(&PyArray_Type, kind, PyArray_NDIM(like), PyArray_DIMS(like),
                              PyArray_STRIDES(like), data, NPY_ARRAY_WRITEABLE | NPY_ARRAY_ALIGNED, nullptr);
}

// The address range of an array's elements.
using Span = std::pair<const char*, const char*>;
Span span_of(PyArrayObject* array);

// A counter that increases when a module, optimizer or hook changes.
extern const int64_t* structure;

// Address and form of an array, compared before the array is used.
struct Form {
  char* data;  // null: any address
  int type, flags;
  std::vector<npy_intp> extents;  // shape and strides

  explicit Form(PyArrayObject* array);
  bool fits(PyArrayObject* array) const;
};

// An argument of the step: an array, a variable with an array, a value to compare, or an object that must be
// identical and is held by a weak reference.
struct Argument {
  enum Kind { ARRAY, VARIABLE, VALUE, OBJECT } kind;
  PyObject* value;      // for an array or a variable: an array of the same form
  PyArrayObject* cell;  // destination of a copy; null: used in place
  std::unique_ptr<Form> form;
};

// The return value of a step. An array has the form of `like`, and its data is at table entry `at`. If `at`
// is -1, -2, ..., it is a new array into which the step writes.
struct Result {
  enum Kind { CONSTANT, ARRAY, VARIABLE, NUMBER, SCALAR, ARGUMENT, TUPLE, LIST, DICT } kind;
  PyObject *object, *node;  // constant, keys, or calc_grad flag of a variable; node or None of a variable
  int at;
  PyArrayObject* like;
  std::vector<Result> parts;
};

class Program {
 public:
  // Create a program from the description of flashlight_py/tape/program.py; null with an exception.
  static std::unique_ptr<Program> read(PyObject* description);

  // Return 1 if the step was captured for such arguments and the current state, else 0; -1 with an exception.
  int fits(PyObject* args, PyObject* kwargs);
  // Run the step after fits() returned 1. Null with an exception, or if the step was left (`is_left`).
  PyObject* replay(PyObject* args, PyObject* kwargs, bool* is_left);
  bool is_busy() const { return is_busy_; }
  bool is_alive() const;  // true if all objects that are arguments exist
  PyObject* description() const { return description_.get(); }  // borrowed

 private:
  struct ArgumentEntry {  // the table entry for memory at `offset` in an array
    size_t entry, argument;
    npy_intp offset;
  };
  struct State {
    PyArrayObject* array;
    Form form;
  };
  struct Name {  // the value of a name that the function uses
    PyObject *holder, *name, *value;
    bool is_items;         // `value`: length of the container `holder`, or a copy of a set
    bool is_number;        // a number or a string, so compare values
    PyObject* descriptor;  // descriptor in C of the attribute `name`; None: no such descriptor
    bool is_in_dict;       // `holder` is a dict; otherwise a list if `index` >= 0
    Py_ssize_t index;
    descrgetfunc read;  // getter of `descriptor`

    void prepare();
    int is_as_before() const;  // 1 or 0; -1 with an exception
  };
  struct Binding {
    PyObject *variable, *value;
    Py_ssize_t since;  // first instruction that writes the array of `value`; -1: none does
  };

  bool read_argument(PyObject* described);
  bool read_table(PyObject* described);
  bool read_instruction_of(PyObject* described);
  bool read_result(PyObject* described, Result* to);
  PyObject* argument_at(PyObject* args, PyObject* kwargs, size_t number) const;  // borrowed
  int take_arguments(PyObject* args, PyObject* kwargs);
  int state_is_unchanged() const;
  bool are_disjoint() const;
  bool set_arguments();
  Outcome run(Py_ssize_t* count);  // `count`: number of instructions that were run
  PyObject* build(const Result& result, PyObject* args, PyObject* kwargs);
  PyObject* build_array(const Result& result);

  Owned description_;  // keeps all referenced objects alive
  std::vector<Argument> arguments_;
  std::vector<PyObject*> names_;  // names of the keyword arguments, which come last
  std::vector<Owned> arrays_;     // arrays of the arguments of this call
  std::vector<State> state_;
  std::vector<Name> names_read_;
  std::vector<char*> table_;
  std::vector<ArgumentEntry> argument_entries_;
  // Sorted address ranges that the step writes. If it writes to arguments, ranges that it reads are included.
  std::vector<Span> occupied_;
  Instructions instructions_;
  std::vector<Binding> gradients_read_, bindings_;  // gradients: read before they are set; set by the step
  Result result_;
  std::vector<PyArrayObject*> new_forms_;  // examples of the new arrays
  std::vector<Owned> new_arrays_;
  int64_t work_ = 0;
  bool is_busy_ = false, may_leave_ = false;
};

// Create an instruction from a description (tape/program.py), which keeps objects alive; null: exception.
std::unique_ptr<Instruction> read_instruction(PyObject* described);

// Return 1 if two values have one type and are equal, floats bit by bit; -1 with an exception.
int same_value(PyObject* before, PyObject* after);

// Allocators for NumPy. new_memory(): return an allocator that records its blocks. use_memory(memory): use it
// on this thread from now on, and return the old allocator. find_memory(memory, array): return the number of
// the array's block and an array that represents the block even after it is freed, or None if the array is
// not in `memory`.
PyObject* new_memory(PyObject*, PyObject*);
PyObject* use_memory(PyObject*, PyObject* memory);
PyObject* find_memory(PyObject*, PyObject* args);

}  // namespace fl::tape
