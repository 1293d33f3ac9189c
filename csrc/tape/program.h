// A captured step: its instructions, and what ties them to Python.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION  // before NumPy 2.3 the default lacks PyDataMem_SetHandler
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

// Fields of tuples that Python describes a program by: objects (borrowed), arrays, addresses, numbers.
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

// Take all fields from `first` on; false with an exception.
template <typename... Fields>
bool read(PyObject* described, Py_ssize_t first, Fields*... fields) {
  const Py_ssize_t count = PyTuple_Check(described) ? PyTuple_Size(described) : -1;
  if (count == first + static_cast<Py_ssize_t>(sizeof...(fields)) &&
      (take(PyTuple_GetItem(described, first++), fields) && ...)) {
    return true;
  }
  if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "not as described: %R", described);
  return false;
}

// Calls `read_one` with each item of a tuple or a list; false with an exception.
template <typename Read>
bool read_each(PyObject* described, Read read_one) {
  const Owned items(PySequence_Tuple(described));
  for (Py_ssize_t i = 0; items != nullptr && i < PyTuple_Size(items.get()); ++i) {
    if (!read_one(PyTuple_GetItem(items.get(), i))) return false;
  }
  return items != nullptr;
}

// Appends an item for each tuple of such fields; false with an exception.
template <auto... fields, typename Item>
bool read_all(PyObject* described, std::vector<Item>* to) {
  return read_each(described, [to](PyObject* each) {
    to->emplace_back();
    return read(each, 0, &(to->back().*fields)...);
  });
}

// The slots of variables. Their descriptors are called directly: by name each takes some 30 ns.
class Slots {
 public:
  enum Name { DATA, GRAD, NODE, HOOK, BUFFER, PLACEMENT, CHANGED, CALC_GRAD, COUNT };

  // `descriptors`: of the slots of `type`, in the order of names; false with an exception.
  bool use(PyObject* type, PyObject* descriptors);
  bool is_instance(PyObject* object) const {
    return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type_;
  }
  Owned get(PyObject* variable, Name name) const;
  void set(PyObject* variable, Name name, PyObject* value) const;
  // A new variable of `array`, which it takes over.
  PyObject* make(Owned array, PyObject* calc_grad, PyObject* node) const;

 private:
  PyObject *type_ = nullptr, *descriptors_ = nullptr, *zero_ = nullptr;  // kept for good
  descrgetfunc read_ = nullptr;
  descrsetfunc write_ = nullptr;
};

extern Slots slots;

// An array of the form of `like` that begins at `data`; null with an exception.
inline PyObject* array_at(PyArrayObject* like, char* data) {
  PyArray_Descr* kind = PyArray_DESCR(like);
  Py_INCREF(kind);
  return PyArray_NewFromDescr(&PyArray_Type, kind, PyArray_NDIM(like), PyArray_DIMS(like),
                              PyArray_STRIDES(like), data, NPY_ARRAY_WRITEABLE | NPY_ARRAY_ALIGNED, nullptr);
}

// The addresses between which the elements of an array lie.
using Span = std::pair<const char*, const char*>;
Span span_of(PyArrayObject* array);

// How often something has changed of what modules, optimizers and hooks compute.
extern const int64_t* structure;

// Where an array lies and what form it has: compared before it is used.
struct Form {
  char* data;  // null: anywhere
  int type, flags;
  std::vector<npy_intp> extents;  // shape and strides

  explicit Form(PyArrayObject* array);
  bool fits(PyArrayObject* array) const;
};

// An argument of the step: an array or a variable of one, or a value that has to be equal; or an object,
// of which there is a weak reference, that has to be the same.
struct Argument {
  enum Kind { ARRAY, VARIABLE, VALUE, OBJECT } kind;
  PyObject* value;      // or an array of the same form
  PyArrayObject* cell;  // what it is copied to; null: it is used where it lies
  std::unique_ptr<Form> form;
};

// What a step returns. Arrays are `like` one, and lie where the table says; -1, -2, ...: they are made anew,
// and the step writes to them.
struct Result {
  enum Kind { CONSTANT, ARRAY, VARIABLE, NUMBER, SCALAR, ARGUMENT, TUPLE, LIST, DICT } kind;
  PyObject *object, *node;  // the constant, or the keys; of a variable whether it learns, and a node or None
  int at;
  PyArrayObject* like;
  std::vector<Result> parts;
};

class Program {
 public:
  // From what flashlight_py/tape/program.py describes; null with an exception.
  static std::unique_ptr<Program> read(PyObject* description);

  // Whether the step was captured for such arguments, and for all as it is now: 1 or 0, -1 with an
  // exception.
  int fits(PyObject* args, PyObject* kwargs);
  // What the step returns, after `fits` has returned 1; null with an exception, or where it has to be
  // left (`is_left`).
  PyObject* replay(PyObject* args, PyObject* kwargs, bool* is_left);
  bool is_busy() const { return is_busy_; }
  bool is_alive() const;  // whether all objects are that are arguments
  PyObject* description() const { return description_.get(); }  // borrowed

 private:
  struct Place {  // an entry of the table that begins in an argument, or in a new array after these
    size_t entry, argument;
    npy_intp offset;
  };
  struct State {
    PyArrayObject* array;
    Form form;
  };
  struct Name {  // what a name of the function stands for
    PyObject *holder, *name, *value;
    bool is_items;         // `value` is how many items `holder`, a container, has; or a copy of it, a set
    bool is_number;        // or a string: compared by value
    PyObject* descriptor;  // of an attribute in C, such as that of a cell; else None
    bool is_in_dict;       // `holder` is one; else, with `index` >= 0, a list
    Py_ssize_t index;
    descrgetfunc read;  // of `descriptor`

    void prepare();
    int is_as_before() const;  // 1 or 0; -1 with an exception
  };
  struct Binding {
    PyObject *variable, *value;
    Py_ssize_t since;  // the first instruction that writes to its array; -1: it has it before
  };

  bool read_argument(PyObject* described);
  bool read_table(PyObject* described);
  bool read_instruction_of(PyObject* described);
  bool read_result(PyObject* described, Result* to);
  PyObject* given(PyObject* args, PyObject* kwargs, size_t number) const;  // borrowed
  int take_arguments(PyObject* args, PyObject* kwargs);
  int holds() const;
  bool are_apart() const;
  bool set_arguments();
  Outcome run(Py_ssize_t* count);  // of instructions that were run
  PyObject* build(const Result& result, PyObject* args, PyObject* kwargs);
  PyObject* build_array(const Result& result);

  Owned description_;  // which keeps all objects that are referred to here
  std::vector<Argument> arguments_;
  std::vector<PyObject*> names_;  // of the arguments that are passed by name, which come last
  std::vector<Owned> arrays_;     // of the arguments of this call
  std::vector<State> state_;
  std::vector<Name> known_;
  std::vector<char*> table_;
  std::vector<Place> places_;
  // What the step writes to, or reads where it writes to arguments: begin and end, in order.
  std::vector<Span> occupied_;
  Instructions instructions_;
  std::vector<Binding> found_, bindings_;  // gradients that the step reads first, and those that it sets
  Result result_;
  std::vector<PyArrayObject*> new_;  // those that are made anew, and what they are like
  std::vector<Owned> made_;
  int64_t work_ = 0;
  bool is_busy_ = false, may_leave_ = false;
};

// An instruction as flashlight_py/tape/program.py describes it, which keeps its objects; null with an
// exception.
std::unique_ptr<Instruction> read_instruction(PyObject* described);

// Whether two values are of one type and equal, floating ones bit by bit; -1 with an exception.
int same_value(PyObject* before, PyObject* after);

// What NumPy allocates on a thread. new_memory(): where it may allocate; use_memory(memory): from now on
// here; returns where until now. find_memory(memory, array): None where the array's was not allocated there;
// else a number of the piece in which it lies, and an array that stands for it, also when it is gone.
PyObject* new_memory(PyObject*, PyObject*);
PyObject* use_memory(PyObject*, PyObject* memory);
PyObject* find_memory(PyObject*, PyObject* args);

}  // namespace fl::tape
