// Loops and kernels that give NumPy's bits. NumPy has the elementwise loops only inside casts and functions,
// not as ufuncs. Products use the BLAS that NumPy has loaded. Sums add in the order of NumPy's sums.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <type_traits>
#include <unordered_map>

#include "tape.h"

namespace fl::tape {

Blas blas;

namespace {

#define FL_KERNELS "csrc/tape/kernels.inc"
#include "../common/each_set.inc"

template <typename From, typename To>
void cast_loop(char** args, const intptr_t* count, const intptr_t* steps, void*) {
  static const auto kernel = FL_CHOSEN(cast<From, To>);
  const char* from = args[0];
  char* to = args[1];
  if (steps[0] == sizeof(From) && steps[1] == sizeof(To)) {
    kernel(reinterpret_cast<const From*>(from), reinterpret_cast<To*>(to), *count);
    return;
  }
  for (intptr_t i = 0; i < *count; ++i, from += steps[0], to += steps[1]) {
    baseline::cast(reinterpret_cast<const From*>(from), reinterpret_cast<To*>(to), 1);
  }
}

// Maximum or minimum of an array and a single number, for which NumPy's loop takes ten times as long.
template <typename R, bool is_maximum>
void limit_loop(char** args, const intptr_t* count, const intptr_t* steps, void*) {
  static const auto kernel = FL_CHOSEN(limit<R, is_maximum>);
  const bool is_whole = steps[0] == sizeof(R) && steps[2] == sizeof(R);
  const R most = *reinterpret_cast<const R*>(args[1]);
  for (intptr_t i = 0; i < (is_whole ? 1 : *count); ++i) {
    kernel(reinterpret_cast<const R*>(args[0] + i * steps[0]), most,
           reinterpret_cast<R*>(args[2] + i * steps[2]), is_whole ? *count : 1);
  }
}

template <size_t size>
void copy_loop(char** args, const intptr_t* count, const intptr_t* steps, void*) {
  const char* from = args[0];
  char* to = args[1];
  if (steps[0] == size && steps[1] == size) {
    std::memmove(to, from, static_cast<size_t>(*count) * size);
    return;
  }
  for (intptr_t i = 0; i < *count; ++i, from += steps[0], to += steps[1]) {
    char element[size];
    std::memcpy(element, from, size);
    std::memcpy(to, element, size);
  }
}

template <size_t size>
void where_loop(char** args, const intptr_t* count, const intptr_t* steps, void*) {
  const char *condition = args[0], *yes = args[1], *no = args[2];
  char* to = args[3];
  for (intptr_t i = 0; i < *count; ++i) {
    char element[size];
    std::memcpy(element, *condition != 0 ? yes : no, size);
    std::memcpy(to, element, size);
    condition += steps[0];
    yes += steps[1];
    no += steps[2];
    to += steps[3];
  }
}

using Loops = std::unordered_map<std::string, Loop>;

// Return NumPy's name of a dtype: its kind and the bytes of an element.
template <typename T>
std::string dtype() {
  const char kind = std::is_floating_point_v<T> ? 'f' : std::is_signed_v<T> ? 'i' : 'u';
  return (std::is_same_v<T, bool> ? 'b' : kind) + std::to_string(sizeof(T));
}

template <typename From, typename... To>
void add_casts(Loops* loops) {
  (((*loops)["cast:" + dtype<From>() + ":" + dtype<To>()] = cast_loop<From, To>), ...);
}

template <typename... From>
void add_casts_to_all(Loops* loops) {
  (add_casts<From, bool, int8_t, int16_t, int32_t, int64_t, float, double>(loops), ...);
}

template <size_t... sizes>
void add_sized(Loops* loops) {
  (((*loops)["copy:" + std::to_string(sizes)] = copy_loop<sizes>), ...);
  (((*loops)["where:" + std::to_string(sizes)] = where_loop<sizes>), ...);
}

Loops all_loops() {
  Loops loops;
  add_casts_to_all<bool, uint8_t, int8_t, int16_t, int32_t, int64_t>(&loops);
  add_casts<float, double, bool>(&loops);
  add_casts<double, float, bool>(&loops);
  loops["maximum:f4"] = limit_loop<float, true>;
  loops["maximum:f8"] = limit_loop<double, true>;
  loops["minimum:f4"] = limit_loop<float, false>;
  loops["minimum:f8"] = limit_loop<double, false>;
  add_sized<1, 2, 4, 8, 16>(&loops);
  return loops;
}

enum { ROW_MAJOR = 101, COLUMN_MAJOR = 102, AS_IT_IS = 111 };  // values of cblas.h; 112 is transposed

template <typename R>
R* at(char* array) {
  return reinterpret_cast<R*>(array);
}

template <typename R, typename Function>
Function* function(void* const (&both)[2]) {
  return reinterpret_cast<Function*>(both[std::is_same_v<R, double>]);
}

template <typename R, typename Int>
void gemm(char* const* arrays, const int64_t* sizes, const double*) {
  using Function = void(int order, int a, int b, Int m, Int n, Int k, R alpha, const R*, Int, const R*, Int,
                        R beta, R*, Int);
  const auto& [a, b, m, n, k, a_step, b_step] = reinterpret_cast<const int64_t(&)[7]>(*sizes);
  function<R, Function>(blas.gemm)(ROW_MAJOR, AS_IT_IS + int(a), AS_IT_IS + int(b), Int(m), Int(n), Int(k), 1,
                                   at<R>(arrays[0]), Int(a_step), at<R>(arrays[1]), Int(b_step), 0,
                                   at<R>(arrays[2]), Int(n));
}

template <typename R, typename Int>
void gemv(char* const* arrays, const int64_t* sizes, const double*) {
  using Function = void(int order, int transposed, Int rows, Int columns, R alpha, const R*, Int, const R*, Int,
                        R beta, R*, Int);
  const auto& [row_major, transposed, rows, columns, matrix_step, x_step] = reinterpret_cast<const int64_t(&)[6]>(*sizes);
  function<R, Function>(blas.gemv)(row_major ? ROW_MAJOR : COLUMN_MAJOR, AS_IT_IS + int(transposed), Int(rows),
                                   Int(columns), 1, at<R>(arrays[0]), Int(matrix_step), at<R>(arrays[1]),
                                   Int(x_step), 0, at<R>(arrays[2]), 1);
}

template <typename R, typename Int>
void dot(char* const* arrays, const int64_t* sizes, const double*) {
  using Function = R(Int count, const R*, Int, const R*, Int);
  const auto& [count, x_step, y_step] = reinterpret_cast<const int64_t(&)[3]>(*sizes);
  *at<R>(arrays[2]) =
      function<R, Function>(blas.dot)(Int(count), at<R>(arrays[0]), Int(x_step), at<R>(arrays[1]), Int(y_step));
}

// An outer product adds no numbers, so it has NumPy's bits without BLAS. BLAS takes four times as long.
template <typename R>
void outer_product(char* const* arrays, const int64_t* sizes, const double*) {
  static const auto kernel = FL_CHOSEN(outer<R>);
  const auto& [scalar, m, n, a_step] = reinterpret_cast<const int64_t(&)[4]>(*sizes);
  kernel(m, n, at<R>(arrays[0]), a_step, at<R>(arrays[1]), at<R>(arrays[2]), int(scalar));
}

template <typename R>
void sum_of_rows(char* const* arrays, const int64_t* sizes, const double*) {
  static const auto kernel = FL_CHOSEN(add_rows<R>);
  kernel(at<R>(arrays[0]), sizes[0], sizes[1], at<R>(arrays[1]));
}

template <typename R>
Kernel* kernel_of(const std::string& product) {
  if (product == "gemm") return blas.is_long ? gemm<R, int64_t> : gemm<R, int>;
  if (product == "gemv") return blas.is_long ? gemv<R, int64_t> : gemv<R, int>;
  if (product == "dot") return blas.is_long ? dot<R, int64_t> : dot<R, int>;
  if (product == "outer") return outer_product<R>;
  return product == "add_rows" ? sum_of_rows<R> : nullptr;
}

}  // namespace

Loop own_loop(const char* name) {
  static const Loops loops = all_loops();
  const auto entry = loops.find(name);
  return entry == loops.end() ? nullptr : entry->second;
}

Kernel* own_kernel(const char* name) {
  const std::string full_name(name), product = full_name.substr(0, full_name.find(':'));
  if (full_name == product + ":f4") return kernel_of<float>(product);
  return full_name == product + ":f8" ? kernel_of<double>(product) : nullptr;
}

}  // namespace fl::tape
