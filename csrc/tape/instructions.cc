// Instructions as Python describes them: tuples that begin with a name.

#include <cstring>
#include <new>
#include <string>

#include "program.h"

namespace fl::tape {
namespace {

// Call what Python gave with arguments that never change.
class Call final : public Instruction {
 public:
  Call(PyObject* function, PyObject* args) : function_(function), args_(args) {}

  Outcome run(Table) override {
    const Owned result(PyObject_Call(function_, args_, nullptr));
    return result == nullptr ? Outcome::failed : Outcome::done;
  }

  int64_t work() const override { return -1; }

 private:
  PyObject *function_, *args_;
};

// A kernel of csrc/nn.
class Native final : public Instruction {
 public:
  using Kernel = void(char* const* arrays, const int64_t* sizes, const double* numbers);
  Native(const char* row, int64_t work)
      : kernel_(*reinterpret_cast<Kernel* const*>(row)), work_(work) {}  // its first field

  Outcome run(Table table) override {
    for (size_t i = 0; i < at.size(); ++i) arrays_[i] = at[i] < 0 ? nullptr : table[at[i]];
    try {
      kernel_(arrays_, sizes.data(), numbers.data());
    } catch (const std::bad_alloc&) {
      const PyGILState_STATE state = PyGILState_Ensure();  // it may run without the interpreter
      PyErr_NoMemory();
      PyGILState_Release(state);
      return Outcome::failed;
    }
    return Outcome::done;
  }
  int64_t work() const override { return work_; }

  std::vector<int> at;  // -1: not given
  std::vector<int64_t> sizes;
  std::vector<double> numbers;

  enum { MOST = 16 };

 private:
  Kernel* kernel_;
  int64_t work_;
  char* arrays_[MOST] = {};
};

// Leave the captured path unless a truth value is true.
class Require final : public Instruction {
 public:
  explicit Require(int at) : at_(at) {}
  Outcome run(Table table) override { return *table[at_] != 0 ? Outcome::done : Outcome::left; }
  int64_t work() const override { return 1; }
  bool may_leave() const override { return true; }

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
  if (!PyErr_Occurred()) PyErr_Format(PyExc_LookupError, "no loop of %s", ufunc->name);
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
    const auto take_step = [&step](PyObject* each) { return take(each, step++); };
    if (!read_each(PyTuple_GetItem(steps, i), take_step)) return false;
  }
  return PyErr_Occurred() == nullptr && find_loop(function, types, &op->loop, &op->data);
}

// ("loops", dimensions, ((function, types, at, steps, itemsizes), ...))
std::unique_ptr<Instruction> read_loops(PyObject* described) {
  PyObject *extents, *operations;
  std::vector<intptr_t> dimensions;
  std::vector<Elementwise> group_of;
  const bool is_read = read(described, 1, &extents, &operations) && read_each(extents, [&](PyObject* each) {
    return take(each, &dimensions.emplace_back());
  }) && read_each(operations, [&](PyObject* each) {
    return read_elementwise(each, dimensions.size(), &group_of.emplace_back());
  });
  return is_read ? group(std::move(group_of), dimensions) : nullptr;
}

// ("reduce", ufunc, types, from, to, rows, columns, itemsize, along rows, the initial value or None)
std::unique_ptr<Instruction> read_reduction(PyObject* described) {
  PyObject *ufunc, *types;
  Reduction r;
  PyArrayObject* initial;
  if (!read(described, 1, &ufunc, &types, &r.from, &r.to, &r.rows, &r.columns, &r.itemsize, &r.along_rows,
            &initial) ||
      !find_loop(ufunc, types, &r.loop, &r.data)) {
    return nullptr;
  }
  r.initial = initial == nullptr ? nullptr : PyArray_BYTES(initial);
  return reduce(r);
}

// A product by its name and fields; see tape.h.
template <typename Form, auto... fields>
std::unique_ptr<Instruction> read_product(PyObject* described) {
  Form form;
  return read(described, 1, &(form.*fields)...) ? product(form) : nullptr;
}
constexpr auto read_gemm =
    read_product<Gemm, &Gemm::transposed_a, &Gemm::transposed_b, &Gemm::is_double, &Gemm::a, &Gemm::b,
                 &Gemm::c, &Gemm::m, &Gemm::n, &Gemm::k, &Gemm::a_step, &Gemm::b_step>;
constexpr auto read_gemv =
    read_product<Gemv, &Gemv::row_major, &Gemv::transposed, &Gemv::is_double, &Gemv::matrix, &Gemv::x,
                 &Gemv::y, &Gemv::rows, &Gemv::columns, &Gemv::matrix_step, &Gemv::x_step>;
constexpr auto read_dot =
    read_product<Dot, &Dot::is_double, &Dot::x, &Dot::y, &Dot::to, &Dot::count, &Dot::x_step, &Dot::y_step>;
constexpr auto read_outer = read_product<Outer, &Outer::scalar, &Outer::is_double, &Outer::a, &Outer::b,
                                         &Outer::c, &Outer::m, &Outer::n, &Outer::a_step>;
constexpr auto read_rows =
    read_product<RowSum, &RowSum::is_double, &RowSum::from, &RowSum::to, &RowSum::rows, &RowSum::columns>;

// ("call", function, args)
std::unique_ptr<Instruction> read_call(PyObject* described) {
  PyObject *function, *args;
  if (!read(described, 1, &function, &args)) return nullptr;
  return std::make_unique<Call>(function, args);
}

// ("native", address, work, sizes, numbers, whether each array is given, entries ...)
std::unique_ptr<Instruction> read_native(PyObject* described) {
  const Owned fixed(PyTuple_GetSlice(described, 0, 6));
  const char* address;
  int64_t work;
  PyObject *sizes, *numbers, *are_given;
  if (!fixed || !read(fixed.get(), 1, &address, &work, &sizes, &numbers, &are_given)) return nullptr;
  auto made = std::make_unique<Native>(address, work);
  Py_ssize_t next = 6;
  const bool is_read = read_each(sizes, [&](PyObject* each) {
    return take(each, &made->sizes.emplace_back());
  }) && read_each(numbers, [&](PyObject* each) {
    made->numbers.push_back(PyFloat_AsDouble(each));
    return PyErr_Occurred() == nullptr;
  }) && read_each(are_given, [&](PyObject* each) {
    int& at = made->at.emplace_back(-1);
    return each != Py_True || take(PyTuple_GetItem(described, next++), &at);
  });
  if (is_read && made->at.size() > Native::MOST) PyErr_SetString(PyExc_ValueError, "too many arrays");
  return PyErr_Occurred() == nullptr ? std::move(made) : nullptr;
}

// ("require", at)
std::unique_ptr<Instruction> read_require(PyObject* described) {
  int at;
  return read(described, 1, &at) ? std::make_unique<Require>(at) : nullptr;
}

}  // namespace

std::unique_ptr<Instruction> read_instruction(PyObject* described) {
  static const struct {
    const char* name;
    std::unique_ptr<Instruction> (*read)(PyObject*);
  } kinds[] = {{"loops", read_loops}, {"reduce", read_reduction}, {"add_rows", read_rows},
               {"gemm", read_gemm},   {"gemv", read_gemv},        {"dot", read_dot},
               {"outer", read_outer}, {"call", read_call},        {"require", read_require},
               {"native", read_native}};
  PyObject* name = PyTuple_Check(described) ? PyTuple_GetItem(described, 0) : nullptr;
  const char* text = name == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(name, nullptr);
  for (const auto& kind : kinds) {
    if (text != nullptr && std::strcmp(kind.name, text) == 0) return kind.read(described);
  }
  if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "no instruction %R", described);
  return nullptr;
}

}  // namespace fl::tape
