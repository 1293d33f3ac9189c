// Wrapper that lets Python call a C++ function that may run out of memory. Include Python.h first.
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

// Call `function` and convert std::bad_alloc to MemoryError. `function` must hold the GIL when it throws.
template <auto function>
constexpr auto caught = &Caught<function>::call;

}  // namespace fl
