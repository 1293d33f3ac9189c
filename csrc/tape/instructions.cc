// Instructions as Python describes them: tuples that begin with a name.

#include <cstring>
#include <string>

#include "products.h"
#include "program.h"

namespace fl::tape {
namespace {

// Call what Python gave with arguments that never change.
class Call final : public Instruction {
 public:
  Call(PyObject* function, PyObject* name, PyObject* args, PyObject* instead)
      : function_(function), name_(name), args_(args), instead_(instead) {}

  Outcome run(Table) override {
    Owned found(name_ == nullptr ? nullptr : PyObject_GetAttr(function_, name_));
    if (name_ != nullptr && found == nullptr) return Outcome::failed;
    PyObject* function = name_ == nullptr ? function_ : found.get();
    Owned result(PyObject_Call(function, args_, nullptr));
    if (result != nullptr && result.get() == Py_NotImplemented && instead_ != Py_None) {
      result.reset(PyObject_CallNoArgs(instead_));
    }
    return result == nullptr ? Outcome::failed : Outcome::done;
  }

  int64_t work() const override { return -1; }

 private:
  PyObject *function_, *name_, *args_, *instead_;
};

// Leave the captured path unless a truth value is true.
class Require final : public Instruction {
 public:
  explicit Require(int at) : at_(at) {}
  Outcome run(Table table) override { return *table[at_] != 0 ? Outcome::done : Outcome::left; }
  int64_t work() const override { return 1; }

 private:
  int at_;
};

// The loop of `ufunc` for the dtypes whose characters are `types`, or one of our own by its name.
bool find_loop(PyObject* function, PyObject* types, Loop* loop, void** data) {
  *data = nullptr;
  if (PyUnicode_Check(function)) {
    const char* name = PyUnicode_AsUTF8AndSize(function, nullptr);
    *loop = name == nullptr ? nullptr : own_loop(name);
    if (*loop == nullptr && !PyErr_Occurred()) PyErr_Format(PyExc_LookupError, "no loop %s", name);
    return *loop != nullptr;
  }
  // The loops inside NumPy's ufuncs, and NumPy's BLAS by address: the bits are NumPy's without a
  // word about them. A kernel of our own for small products was 0.9 to 2 times as fast as
  // OpenBLAS's, and has other bits.
  const PyUFuncObject* ufunc = reinterpret_cast<PyUFuncObject*>(function);
  Owned numbers(PySequence_Tuple(types));
  if (numbers == nullptr) return false;
  for (int i = 0; i < ufunc->ntypes; ++i) {
    bool same = PyTuple_Size(numbers.get()) == ufunc->nargs;
    for (int k = 0; same && k < ufunc->nargs; ++k) {
      same = ufunc->types[i * ufunc->nargs + k] == PyLong_AsLong(PyTuple_GetItem(numbers.get(), k));
    }
    if (same) {
      *loop = reinterpret_cast<Loop>(ufunc->functions[i]);
      *data = ufunc->data == nullptr ? nullptr : const_cast<void*>(ufunc->data[i]);
      return true;
    }
  }
  if (!PyErr_Occurred()) PyErr_Format(PyExc_LookupError, "no loop of %s", ufunc->name);
  return false;
}

bool read_elementwise(PyObject* described, size_t dimensions, Elementwise* op) {
  PyObject *function, *types, *at, *steps, *itemsizes;
  if (!PyArg_ParseTuple(described, "OOO!O!O!", &function, &types, &PyTuple_Type, &at, &PyTuple_Type,
                        &steps, &PyTuple_Type, &itemsizes)) {
    return false;
  }
  op->operands = static_cast<int>(PyTuple_Size(at));
  if (op->operands > MOST_OPERANDS || dimensions > MOST_DIMENSIONS) {
    PyErr_SetString(PyExc_ValueError, "too many operands or dimensions");
    return false;
  }
  for (int i = 0; i < op->operands; ++i) {
    op->at[i] = static_cast<int>(PyLong_AsLong(PyTuple_GetItem(at, i)));
    op->itemsize[i] = PyLong_AsSsize_t(PyTuple_GetItem(itemsizes, i));
    for (size_t d = 0; d < dimensions; ++d) {
      PyObject* step = PyTuple_GetItem(PyTuple_GetItem(steps, i), static_cast<Py_ssize_t>(d));
      op->steps[i][d] = PyLong_AsSsize_t(step);
    }
  }
  return PyErr_Occurred() == nullptr && find_loop(function, types, &op->loop, &op->data);
}

// ("loops", dimensions, ((function, types, at, steps, itemsizes), ...))
std::unique_ptr<Instruction> read_loops(PyObject* described) {
  PyObject *name, *extents, *operations;
  if (!PyArg_ParseTuple(described, "OO!O!", &name, &PyTuple_Type, &extents, &PyTuple_Type, &operations)) {
    return nullptr;
  }
  std::vector<intptr_t> dimensions;
  for (Py_ssize_t i = 0; i < PyTuple_Size(extents); ++i) {
    dimensions.push_back(PyLong_AsSsize_t(PyTuple_GetItem(extents, i)));
  }
  std::vector<Elementwise> group_of(static_cast<size_t>(PyTuple_Size(operations)));
  for (size_t i = 0; i < group_of.size(); ++i) {
    PyObject* operation = PyTuple_GetItem(operations, static_cast<Py_ssize_t>(i));
    if (!read_elementwise(operation, dimensions.size(), &group_of[i])) return nullptr;
  }
  return group(std::move(group_of), dimensions);
}

// ("reduce", ufunc, types, from, to, rows, columns, row step, column step, result step, itemsize,
//  along rows, address of the initial value or 0)
std::unique_ptr<Instruction> read_reduction(PyObject* described) {
  PyObject *name, *ufunc, *types;
  Reduction r;
  int along_rows;
  Py_ssize_t initial;
  if (!PyArg_ParseTuple(described, "OOOiinnnnnnpn", &name, &ufunc, &types, &r.from, &r.to, &r.rows,
                        &r.columns, &r.row_step, &r.column_step, &r.result_step, &r.itemsize,
                        &along_rows, &initial) ||
      !find_loop(ufunc, types, &r.loop, &r.data)) {
    return nullptr;
  }
  r.along_rows = along_rows != 0;
  r.initial = reinterpret_cast<const char*>(initial);
  return reduce(r);
}

// ("add_rows", is double, from, to, rows, columns, row step in elements)
std::unique_ptr<Instruction> read_rows(PyObject* described) {
  PyObject* name;
  int is_double, from, to;
  Py_ssize_t rows, columns, row_step;
  if (!PyArg_ParseTuple(described, "Opiinnn", &name, &is_double, &from, &to, &rows, &columns,
                        &row_step)) {
    return nullptr;
  }
  return add_rows(is_double != 0, from, to, rows, columns, row_step);
}

// ("gemm", is double, transposed a, transposed b, at a, at b, at c, m, n, k, three steps)
std::unique_ptr<Instruction> read_gemm(PyObject* described) {
  PyObject* name;
  Gemm g;
  return PyArg_ParseTuple(described, "OiiiiiiLLLLLL", &name, &g.is_double, &g.transposed_a,
                          &g.transposed_b, &g.a, &g.b, &g.c, &g.m, &g.n, &g.k, &g.a_step, &g.b_step,
                          &g.c_step)
             ? multiply(g)
             : nullptr;
}

// ("gemv", is double, order, transposed, at the matrix, at x, at y, rows, columns, two steps)
std::unique_ptr<Instruction> read_gemv(PyObject* described) {
  PyObject* name;
  Gemv g;
  return PyArg_ParseTuple(described, "OiiiiiiLLLL", &name, &g.is_double, &g.order, &g.transposed,
                          &g.matrix, &g.x, &g.y, &g.rows, &g.columns, &g.matrix_step, &g.x_step)
             ? multiply(g)
             : nullptr;
}

// ("dot", is double, at x, at y, at the result, count, two steps)
std::unique_ptr<Instruction> read_dot(PyObject* described) {
  PyObject* name;
  Dot d;
  return PyArg_ParseTuple(described, "OiiiiLLL", &name, &d.is_double, &d.x, &d.y, &d.to, &d.count,
                          &d.x_step, &d.y_step)
             ? multiply(d)
             : nullptr;
}

// ("outer", is double, which is one number, at a, at b, at c, m, n, two steps)
std::unique_ptr<Instruction> read_outer(PyObject* described) {
  PyObject* name;
  Outer o;
  return PyArg_ParseTuple(described, "OiiiiiLLLL", &name, &o.is_double, &o.scalar, &o.a, &o.b, &o.c, &o.m,
                          &o.n, &o.a_step, &o.c_step)
             ? multiply(o)
             : nullptr;
}

// ("call", function, args, what to call where that returns NotImplemented, or None). In place of a
// function: (what has it, the name of the attribute), where it may be another one at each call.
std::unique_ptr<Instruction> read_call(PyObject* described) {
  PyObject *name, *function, *args, *instead;
  if (!PyArg_ParseTuple(described, "OOO!O", &name, &function, &PyTuple_Type, &args, &instead)) {
    return nullptr;
  }
  PyObject* attribute = nullptr;
  if (PyTuple_Check(function) && !PyArg_ParseTuple(function, "OO", &function, &attribute)) return nullptr;
  return std::make_unique<Call>(function, attribute, args, instead);
}

// ("require", at)
std::unique_ptr<Instruction> read_require(PyObject* described) {
  PyObject* name;
  int at;
  if (!PyArg_ParseTuple(described, "Oi", &name, &at)) return nullptr;
  return std::make_unique<Require>(at);
}

}  // namespace

std::unique_ptr<Instruction> read_instruction(PyObject* described) {
  static const struct {
    const char* name;
    std::unique_ptr<Instruction> (*read)(PyObject*);
  } kinds[] = {{"loops", read_loops}, {"reduce", read_reduction}, {"add_rows", read_rows},
               {"gemm", read_gemm},
               {"gemv", read_gemv},   {"dot", read_dot},          {"outer", read_outer},
               {"call", read_call},   {"require", read_require}};
  PyObject* name = PyTuple_Check(described) ? PyTuple_GetItem(described, 0) : nullptr;
  const char* text = name == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(name, nullptr);
  for (const auto& kind : kinds) {
    if (text != nullptr && std::strcmp(kind.name, text) == 0) return kind.read(described);
  }
  if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "no instruction %R", described);
  return nullptr;
}

}  // namespace fl::tape
