// The module: kernels by name, and calls of kernels on NumPy arrays.

#define FL_MODULE
#include "../common/numpy.h"

#include <algorithm>
#include <cstring>
#include <future>
#include <initializer_list>
#include <vector>

#include "nn.h"

namespace fl::nn {

namespace {

int (*blas_threads)() = nullptr;
constexpr Py_ssize_t MOST_ARRAYS = 16, MOST_SIZES = 32, MOST_NUMBERS = 8;

/* find(name): return the address of the kernel's row. */
PyObject* find(PyObject*, PyObject* name) {
  const char* wanted_name = PyUnicode_AsUTF8AndSize(name, nullptr);
  if (wanted_name == nullptr) return nullptr;
  for (const Row* rows : {convolutions, layers}) {
    for (const Row* row = rows; row->name != nullptr; ++row) {
      if (std::strcmp(row->name, wanted_name) == 0) return PyLong_FromVoidPtr(const_cast<Row*>(row));
    }
  }
  return PyErr_Format(PyExc_LookupError, "unknown kernel %s", wanted_name);
}

// Read a tuple of up to `most` items into `to`. Return false if an exception is set.
template <typename T, typename Convert>
bool read(PyObject* tuple, Py_ssize_t most, T* to, Convert convert) {
  const Py_ssize_t count = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1;
  if (count < 0 || count > most) {
    PyErr_Format(PyExc_TypeError, "expected a tuple of at most %zd, got %R", most, tuple);
    return false;
  }
  for (Py_ssize_t i = 0; i < count; ++i) to[i] = convert(PyTuple_GetItem(tuple, i));
  return PyErr_Occurred() == nullptr;
}

char* memory_of(PyObject* object) {
  if (object == Py_None) return nullptr;
  PyArrayObject* array = reinterpret_cast<PyArrayObject*>(object);
  if (PyArray_Check(object) && PyArray_ISCARRAY_RO(array)) return PyArray_BYTES(array);
  PyErr_Format(PyExc_TypeError, "a kernel needs C-contiguous, aligned arrays, got %R", Py_TYPE(object));
  return nullptr;
}

// Compute the bytes of an array from its word in Row::arrays.
int64_t bytes_of(const char* word, const int64_t* sizes, int64_t item) {
  bool divides = false;
  for (; *word != ' ' && *word != 0; ++word) {
    if (*word == '/') {
      divides = true;
    } else if (*word == 'I' || *word == 'B') {
      item = *word == 'I' ? sizeof(int64_t) : 1;
    } else {
      const int64_t size = sizes[*word <= '9' ? *word - '0' : *word - 'a' + 10];
      item = divides ? item / size : item * size;
    }
  }
  return item;
}

// Return the bytes of `array`, or 0 if it is a view and its base array has other memory since a resize.
int64_t bytes_in(PyArrayObject* array) {
  PyObject* base = PyArray_BASE(array);
  PyArrayObject* owner = reinterpret_cast<PyArrayObject*>(base);
  if (base != nullptr && PyArray_Check(base) && PyArray_CHKFLAGS(owner, NPY_ARRAY_OWNDATA)) {
    const char *low = PyArray_BYTES(owner), *begin = PyArray_BYTES(array);
    if (begin < low || begin + PyArray_NBYTES(array) > low + PyArray_NBYTES(owner)) return 0;
  }
  return PyArray_NBYTES(array);
}

// True if all arrays are as large as the kernel needs, else false with an exception. Reason: a user may have
// resized an array since the forward pass.
bool are_whole(const Row& row, PyObject* arrays, const int64_t* sizes) {
  const char* word = row.arrays;
  const int64_t item = row.name[std::strlen(row.name) - 1] == 'f' ? sizeof(float) : sizeof(double);
  for (Py_ssize_t i = 0; i < PyTuple_Size(arrays); ++i) {
    PyObject* array = PyTuple_GetItem(arrays, i);
    const int64_t needed = bytes_of(word, sizes, item);
    if (array != Py_None && bytes_in(reinterpret_cast<PyArrayObject*>(array)) < needed) {
      PyErr_Format(PyExc_RuntimeError,
                   "%s: expected array %zd to have %lld bytes, as in the forward pass, got %lld; call backward() "
                   "before you resize an array",
                   row.name, i, static_cast<long long>(needed),
                   static_cast<long long>(bytes_in(reinterpret_cast<PyArrayObject*>(array))));
      return false;
    }
    word += std::strcspn(word, " ");
    word += *word == ' ';
  }
  return true;
}

/* begin_pass() and give_back(): unmap old or all kept blocks, and keep the blocks that this thread frees. */
template <size_t passes>
PyObject* begin_pass_here(PyObject*, PyObject*) {
  begin_pass(passes);
  if (!keep_freed()) return nullptr;
  Py_RETURN_NONE;
}

/* kept_bytes(): return the bytes of freed blocks that are kept. */
PyObject* kept_bytes_now(PyObject*, PyObject*) { return PyLong_FromSize_t(kept_bytes()); }

/* call(row, arrays, sizes, numbers): write the results, the first arrays. */
PyObject* call(PyObject*, PyObject* args) {
  PyObject *address, *arrays, *sizes, *numbers;
  char* memory[MOST_ARRAYS] = {};
  int64_t size[MOST_SIZES];
  double number[MOST_NUMBERS];
  if (!PyArg_ParseTuple(args, "OOOO", &address, &arrays, &sizes, &numbers) ||
      !read(arrays, MOST_ARRAYS, memory, memory_of) || !read(sizes, MOST_SIZES, size, PyLong_AsLongLong) ||
      !read(numbers, MOST_NUMBERS, number, PyFloat_AsDouble)) {
    return nullptr;
  }
  const Row* row = static_cast<const Row*>(PyLong_AsVoidPtr(address));
  if (row == nullptr || !are_whole(*row, arrays, size) || !keep_freed()) return nullptr;
  bool has_room = true;
  Py_BEGIN_ALLOW_THREADS;
  try {
    row->kernel(memory, size, number);
  } catch (const std::bad_alloc&) {
    has_room = false;
  }
  Py_END_ALLOW_THREADS;
  if (!has_room) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

/* use_threads_of(function): store the address of OpenBLAS's openblas_get_num_threads, or nothing. */
PyObject* use_threads_of(PyObject*, PyObject* args) {
  Py_ssize_t address = 0;
  if (!PyArg_ParseTuple(args, "|n", &address)) return nullptr;
  blas_threads = reinterpret_cast<int (*)()>(address);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"find", find, METH_O, nullptr},
                         {"call", call, METH_VARARGS, nullptr},
                         {"begin_pass", begin_pass_here<8>, METH_NOARGS, nullptr},
                         {"give_back", begin_pass_here<0>, METH_NOARGS, nullptr},
                         {"kept_bytes", kept_bytes_now, METH_NOARGS, nullptr},
                         {"use_threads_of", use_threads_of, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_nn", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

int64_t threads_for(int64_t products) {
  constexpr int64_t LEAST = 4 << 20;  // about 0.1 ms: a thread starts in a tenth of this time
  if (products < 2 * LEAST || blas_threads == nullptr) return 1;
  return std::clamp<int64_t>(blas_threads(), 1, products / LEAST);
}

void in_threads(int64_t count, const std::function<void(int64_t)>& call) {
  std::vector<std::future<void>> others;  // their destructors wait
  for (int64_t i = 1; i < count; ++i) others.push_back(std::async(std::cref(call), i));
  call(0);
  for (std::future<void>& other : others) other.get();
}

}  // namespace fl::nn

PyMODINIT_FUNC PyInit__nn(void) {
  import_array();
  return PyModule_Create(&fl::nn::module);
}
