#include "reduce.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "half.h"

namespace fl {
namespace {

template <typename T>
struct Complex {
  T re, im;
};

// How a stored type is loaded, accumulated, scaled and stored.
template <typename T, typename = void>
struct Traits {  // real floating point
  using Acc = T;
  static Acc load(T value) { return value; }
  static T store(Acc value) { return value; }
  static Acc scaled(Acc value, double scale) { return value * static_cast<T>(scale); }
};

template <typename T>
struct Traits<T, std::enable_if_t<std::is_integral_v<T>>> {
  // Arithmetic in the unsigned type, of at least int's width: overflow wraps instead of being
  // undefined. Comparisons go through the stored type.
  using Acc = std::conditional_t<(sizeof(T) < 4), uint32_t, std::make_unsigned_t<T>>;
  static Acc load(T value) { return static_cast<Acc>(value); }
  static T store(Acc value) { return static_cast<T>(value); }
  static Acc scaled(Acc value, double scale) {
    return value * static_cast<Acc>(static_cast<int64_t>(scale));
  }
};

template <typename T>
struct HalfTraits {
  using Acc = float;
  static Acc load(T value) { return value.widen(); }
  static T store(Acc value) { return T::narrow(value); }
  static Acc scaled(Acc value, double scale) { return value * static_cast<float>(scale); }
};
template <>
struct Traits<Float16> : HalfTraits<Float16> {};
template <>
struct Traits<Bfloat16> : HalfTraits<Bfloat16> {};

template <typename T>
struct Traits<Complex<T>> {
  using Acc = Complex<T>;
  static Acc load(Acc value) { return value; }
  static Acc store(Acc value) { return value; }
  static Acc scaled(Acc value, double scale) {
    return {value.re * static_cast<T>(scale), value.im * static_cast<T>(scale)};
  }
};

struct Sum {
  template <typename Stored, typename Acc>
  static Acc apply(Acc a, Acc b) { return a + b; }
  template <typename Stored, typename T>
  static Complex<T> apply(Complex<T> a, Complex<T> b) { return {a.re + b.re, a.im + b.im}; }
};

struct Prod {
  template <typename Stored, typename Acc>
  static Acc apply(Acc a, Acc b) { return a * b; }
  template <typename Stored, typename T>
  static Complex<T> apply(Complex<T> a, Complex<T> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};

template <bool kLess>
struct Extreme {
  template <typename Stored, typename Acc>
  static Acc apply(Acc a, Acc b) {
    if constexpr (std::is_integral_v<Stored>) {
      const bool keep = kLess ? Stored(a) <= Stored(b) : Stored(a) >= Stored(b);
      return keep ? a : b;
    } else {
      const bool keep = (kLess ? a <= b : a >= b) || a != a;  // a NaN stays
      return keep ? a : b;
    }
  }
};

// Blocks that fit in the first-level cache: the accumulator is read and written `ranks` times.
constexpr size_t kBlock = 1024;

template <typename T, typename Op>
void reduce_typed(double scale, void* into, const void* const* from, int ranks, size_t count) {
  using Acc = typename Traits<T>::Acc;
  Acc acc[kBlock];
  for (size_t start = 0; start < count; start += kBlock) {
    const size_t n = std::min(kBlock, count - start);
    const T* first = static_cast<const T*>(from[0]) + start;
    for (size_t i = 0; i < n; ++i) acc[i] = Traits<T>::load(first[i]);
    for (int r = 1; r < ranks; ++r) {
      const T* next = static_cast<const T*>(from[r]) + start;
      for (size_t i = 0; i < n; ++i) {
        acc[i] = Op::template apply<T>(acc[i], Traits<T>::load(next[i]));
      }
    }
    T* out = static_cast<T*>(into) + start;
    if (scale == 1.0) {
      for (size_t i = 0; i < n; ++i) out[i] = Traits<T>::store(acc[i]);
    } else {
      for (size_t i = 0; i < n; ++i) out[i] = Traits<T>::store(Traits<T>::scaled(acc[i], scale));
    }
  }
}

template <typename T>
bool arithmetic(int op, double scale, void* into, const void* const* from, int ranks, size_t n) {
  switch (op) {
    case kSum: reduce_typed<T, Sum>(scale, into, from, ranks, n); return true;
    case kProd: reduce_typed<T, Prod>(scale, into, from, ranks, n); return true;
    default: return false;
  }
}

template <typename T>
bool extreme(int op, double scale, void* into, const void* const* from, int ranks, size_t n) {
  switch (op) {
    case kMin: reduce_typed<T, Extreme<true>>(scale, into, from, ranks, n); return true;
    case kMax: reduce_typed<T, Extreme<false>>(scale, into, from, ranks, n); return true;
    default: return false;
  }
}

template <typename T>
bool ordered(int op, double scale, void* into, const void* const* from, int ranks, size_t n) {
  return arithmetic<T>(op, scale, into, from, ranks, n) ||
         extreme<T>(op, scale, into, from, ranks, n);
}

}  // namespace

bool reduce(int dtype, int op, double scale, void* into, const void* const* from, int ranks,
            size_t count) {
  switch (dtype) {
    case kBool: return extreme<uint8_t>(op, scale, into, from, ranks, count);
    case kInt8: return ordered<int8_t>(op, scale, into, from, ranks, count);
    case kInt16: return ordered<int16_t>(op, scale, into, from, ranks, count);
    case kInt32: return ordered<int32_t>(op, scale, into, from, ranks, count);
    case kInt64: return ordered<int64_t>(op, scale, into, from, ranks, count);
    case kUint8: return ordered<uint8_t>(op, scale, into, from, ranks, count);
    case kUint16: return ordered<uint16_t>(op, scale, into, from, ranks, count);
    case kUint32: return ordered<uint32_t>(op, scale, into, from, ranks, count);
    case kUint64: return ordered<uint64_t>(op, scale, into, from, ranks, count);
    case kFloat16: return ordered<Float16>(op, scale, into, from, ranks, count);
    case kBfloat16: return ordered<Bfloat16>(op, scale, into, from, ranks, count);
    case kFloat32: return ordered<float>(op, scale, into, from, ranks, count);
    case kFloat64: return ordered<double>(op, scale, into, from, ranks, count);
    case kLongDouble: return ordered<long double>(op, scale, into, from, ranks, count);
    case kComplex64: return arithmetic<Complex<float>>(op, scale, into, from, ranks, count);
    case kComplex128: return arithmetic<Complex<double>>(op, scale, into, from, ranks, count);
    case kComplexLongDouble:
      return arithmetic<Complex<long double>>(op, scale, into, from, ranks, count);
    default: return false;
  }
}

}  // namespace fl
