// Functions of Python's tables that may run out of memory. Include Python.h before.
#pragma once

#include <new>

namespace fl {

template <auto function>
struct Caught;
template <typename... Args, PyObject* (*function)(Args...)>
struct Caught<function> {
  static PyObject* call(Args... args) noexcept {
    try {
      return function(args...);
    } catch (const std::bad_alloc&) {
      return PyErr_NoMemory();
    }
  }
};

// `function`, but for what it throws: a MemoryError. It must hold the interpreter where it throws.
template <auto function>
constexpr auto caught = &Caught<function>::call;

}  // namespace fl
