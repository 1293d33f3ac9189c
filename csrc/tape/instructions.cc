// Instructions, read from tuples that Python creates and that begin with a name.

#include <cstring>
#include <new>
#include <string>

#include "program.h"

namespace fl::tape {
namespace {

struct Call final : public Instruction {
  PyObject *function, *args;

  Outcome run(Table) override {
    const Owned result(PyObject_Call(function, args, nullptr));
    return result == nullptr ? Outcome::failed : Outcome::done;
  }
  int64_t work() const override { return -1; }
};

struct Native final : public Instruction {
  Kernel* kernel;
  int64_t elements;
  enum { MOST = 16 };
  int count = 0, at[MOST];  // table entries of the arrays; -1: not passed
  char* arrays[MOST];       // addresses in the current run
  std::vector<int64_t> sizes;
  std::vector<double> numbers;

  Outcome run(Table table) override {
    for (int i = 0; i < count; ++i) arrays[i] = at[i] < 0 ? nullptr : table[at[i]];
    try {
      kernel(arrays, sizes.data(), numbers.data());
    } catch (const std::bad_alloc&) {
      const PyGILState_STATE state = PyGILState_Ensure();  // the step may run without the GIL
      PyErr_NoMemory();
      PyGILState_Release(state);
      return Outcome::failed;
    }
    return Outcome::done;
  }
  int64_t work() const override { return elements; }
};

// Ends the replay if the truth value at table entry `at` is false.
struct Require final : public Instruction {
  int at;

  Outcome run(Table table) override { return *table[at] != 0 ? Outcome::done : Outcome::left; }
  int64_t work() const override { return 1; }
  bool may_leave() const override { return true; }
};

// Find the loop of a ufunc for the dtype characters `types`, or a loop of this folder by name.
bool find_loop(PyObject* function, PyObject* types, Loop* loop, void** data) {
  *data = nullptr;
  if (PyUnicode_Check(function)) {
    const char* name = PyUnicode_AsUTF8AndSize(function, nullptr);
    *loop = name == nullptr ? nullptr : own_loop(name);
    if (*loop == nullptr && !PyErr_Occurred()) PyErr_Format(PyExc_LookupError, "unknown loop %s", name);
    return *loop != nullptr;
  }
  // NumPy's own loops give NumPy's bits, and so does its BLAS. A new kernel for small products was 0.9 to 2
  // times as fast as OpenBLAS, but gave other bits.
  const PyUFuncObject* ufunc = reinterpret_cast<PyUFuncObject*>(function);
  for (int i = 0; i < ufunc->ntypes; ++i) {
    bool same = PyTuple_Size(types) == ufunc->nargs;
    for (int k = 0; same && k < ufunc->nargs; ++k) {
      same = ufunc->types[i * ufunc->nargs + k] == PyLong_AsLong(PyTuple_GetItem(types, k));
    }
    if (same) {
      *loop = reinterpret_cast<Loop>(ufunc->functions[i]);
      *data = ufunc->data == nullptr ? nullptr : const_cast<void*>(ufunc->data[i]);
      return true;
    }
  }
  if (!PyErr_Occurred()) PyErr_Format(PyExc_LookupError, "%s has no loop for these types", ufunc->name);
  return false;
}

bool read_elementwise(PyObject* described, size_t dimensions, Elementwise* op) {
  PyObject *function, *types, *at, *steps, *itemsizes;
  if (!read(described, 0, &function, &types, &at, &steps, &itemsizes)) return false;
  op->operands = static_cast<int>(PyTuple_Size(at));
  op->sums =
      !PyUnicode_Check(function) && op->operands < reinterpret_cast<PyUFuncObject*>(function)->nargs;
  if (op->operands > MOST_OPERANDS || dimensions > MOST_DIMENSIONS) {
    PyErr_SetString(PyExc_ValueError, "too many operands or dimensions");
    return false;
  }
  for (int i = 0; i < op->operands; ++i) {
    take(PyTuple_GetItem(at, i), &op->at[i]);
    take(PyTuple_GetItem(itemsizes, i), &op->itemsize[i]);
    intptr_t* step = op->steps[i];
    const auto take_step = [&step](PyObject* item) { return take(item, step++); };
    if (!read_each(PyTuple_GetItem(steps, i), take_step)) return false;
  }
  return PyErr_Occurred() == nullptr && find_loop(function, types, &op->loop, &op->data);
}

// Read ("loops", dimensions, ((function, types, at, steps, itemsizes), ...))
std::unique_ptr<Instruction> read_loops(PyObject* described) {
  PyObject *extents, *operations;
  std::vector<intptr_t> dimensions;
  std::vector<Elementwise> group_of;
  const bool is_read = read(described, 1, &extents, &operations) && read_each(extents, [&](PyObject* item) {
    return take(item, &dimensions.emplace_back());
  }) && read_each(operations, [&](PyObject* item) {
    return read_elementwise(item, dimensions.size(), &group_of.emplace_back());
  });
  return is_read ? group(std::move(group_of), dimensions) : nullptr;
}

// Read ("reduce", ufunc, types, rows, columns, itemsize, along rows, initial value or None, from, to)
std::unique_ptr<Instruction> read_reduction(PyObject* described) {
  PyObject *ufunc, *types;
  auto instruction = std::make_unique<Reduction>();
  Reduction& r = *instruction;
  PyArrayObject* initial;
  if (!read(described, 1, &ufunc, &types, &r.rows, &r.columns, &r.itemsize, &r.along_rows, &initial, &r.from,
            &r.to) ||
      !find_loop(ufunc, types, &r.loop, &r.data)) {
    return nullptr;
  }
  r.initial = initial == nullptr ? nullptr : PyArray_BYTES(initial);
  return instruction;
}

// Read ("call", function, args).
std::unique_ptr<Instruction> read_call(PyObject* described) {
  auto instruction = std::make_unique<Call>();
  return read(described, 1, &instruction->function, &instruction->args) ? std::move(instruction) : nullptr;
}

// Find a kernel of this folder by name, or a kernel of csrc/nn by the address of its Row.
Kernel* find_kernel(PyObject* kernel_name) {
  if (PyLong_Check(kernel_name)) return *static_cast<Kernel* const*>(PyLong_AsVoidPtr(kernel_name));
  const char* name = PyUnicode_AsUTF8AndSize(kernel_name, nullptr);
  Kernel* kernel = name == nullptr ? nullptr : own_kernel(name);
  if (kernel == nullptr && !PyErr_Occurred()) PyErr_Format(PyExc_LookupError, "unknown kernel %s", name);
  return kernel;
}

// Read ("native", kernel, work, sizes, numbers, tuple of bools: which arrays are passed, table entries ...)
std::unique_ptr<Instruction> read_native(PyObject* described) {
  const Owned fixed(PyTuple_GetSlice(described, 0, 6));
  auto instruction = std::make_unique<Native>();
  PyObject *kernel_name, *sizes, *numbers, *are_given;
  if (!fixed || !read(fixed.get(), 1, &kernel_name, &instruction->elements, &sizes, &numbers,
                      &are_given)) return nullptr;
  instruction->kernel = find_kernel(kernel_name);
  Py_ssize_t next = 6;
  const bool is_read = instruction->kernel != nullptr && read_each(sizes, [&](PyObject* item) {
    return take(item, &instruction->sizes.emplace_back());
  }) && read_each(numbers, [&](PyObject* item) {
    instruction->numbers.push_back(PyFloat_AsDouble(item));
    return PyErr_Occurred() == nullptr;
  }) && read_each(are_given, [&](PyObject* item) {
    if (instruction->count == Native::MOST) return PyErr_SetString(PyExc_ValueError, "too many arrays"), false;
    int& at = instruction->at[instruction->count++] = -1;
    return item != Py_True || take(PyTuple_GetItem(described, next++), &at);
  });
  return is_read ? std::move(instruction) : nullptr;
}

// Read ("require", at).
std::unique_ptr<Instruction> read_require(PyObject* described) {
  auto instruction = std::make_unique<Require>();
  return read(described, 1, &instruction->at) ? std::move(instruction) : nullptr;
}

}  // namespace

std::unique_ptr<Instruction> read_instruction(PyObject* described) {
  static const struct {
    const char* name;
    std::unique_ptr<Instruction> (*read)(PyObject*);
  } kinds[] = {{"loops", read_loops}, {"reduce", read_reduction}, {"native", read_native},
               {"call", read_call},   {"require", read_require}};
  PyObject* name = PyTuple_Check(described) ? PyTuple_GetItem(described, 0) : nullptr;
  const char* text = name == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(name, nullptr);
  for (const auto& kind : kinds) {
    if (text != nullptr && std::strcmp(kind.name, text) == 0) return kind.read(described);
  }
  if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "unknown instruction %R", described);
  return nullptr;
}

}  // namespace fl::tape
