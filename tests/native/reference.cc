#include "reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace stress {
namespace {

constexpr int kPadded = sizeof(long double);
constexpr int kExtended = std::numeric_limits<long double>::digits == 64 ? 10 : kPadded;

const DTypeInfo kInfo[kDTypes] = {
    {"bool", 1, 1, 1},       {"int8", 1, 1, 1},       {"int16", 2, 2, 1},
    {"int32", 4, 4, 1},      {"int64", 8, 8, 1},      {"uint8", 1, 1, 1},
    {"uint16", 2, 2, 1},     {"uint32", 4, 4, 1},     {"uint64", 8, 8, 1},
    {"float16", 2, 2, 1},    {"bfloat16", 2, 2, 1},   {"float32", 4, 4, 1},
    {"float64", 8, 8, 1},    {"longdouble", kPadded, kExtended, 1},
    {"complex64", 8, 4, 2},  {"complex128", 16, 8, 2}, {"clongdouble", 2 * kPadded, kExtended, 2},
};

template <typename T>
T read(const void* data, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + i * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void write(void* data, size_t i, T value) {
  std::memcpy(static_cast<char*>(data) + i * sizeof(T), &value, sizeof(T));
}

// The value of 1 sign bit, `exponent_bits` and `mantissa_bits`. Every float16 and bfloat16 is a float.
float widen(uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int top = (1 << exponent_bits) - 1, bias = top >> 1;
  const int exponent = (bits >> mantissa_bits) & top, mantissa = bits & ((1 << mantissa_bits) - 1);
  double value;
  if (exponent == top) {
    value = mantissa != 0 ? NAN : INFINITY;
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    value = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
  return static_cast<float>((bits & 0x8000) != 0 ? -value : value);
}

uint16_t narrow(float value, int exponent_bits, int mantissa_bits) {
  const int top = (1 << exponent_bits) - 1, bias = top >> 1;
  const int sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value))
    return static_cast<uint16_t>(sign | ((2 * top + 1) << (mantissa_bits - 1)));
  const double size = std::fabs(static_cast<double>(value));
  const int least = 1 - bias;
  int exponent = size == 0 || std::isinf(size) ? least : std::max(std::ilogb(size), least);
  // In units of the last place, rounded to even by the default rounding mode.
  double units = std::isinf(size) ? size : std::nearbyint(std::ldexp(size, mantissa_bits - exponent));
  if (units >= std::ldexp(1, mantissa_bits + 1)) {
    units /= 2;
    ++exponent;
  }
  if (std::isinf(units) || exponent > bias)
    return static_cast<uint16_t>(sign | top << mantissa_bits);
  const int whole = static_cast<int>(units);
  const bool subnormal = whole < (1 << mantissa_bits);
  const int field = subnormal ? 0 : exponent + bias;
  return static_cast<uint16_t>(sign | field << mantissa_bits | (whole & ((1 << mantissa_bits) - 1)));
}

template <typename T>
T bits(int op, T a, T b) {
  return op == FL_AND ? a & b : op == FL_OR ? a | b : a ^ b;
}

template <typename T>
T combine(int op, T a, T b) {
  switch (op) {
    case FL_SUM: return a + b;
    case FL_PROD: return a * b;
    case FL_MIN: return a != a || a <= b ? a : b;
    default: return a != a || a >= b ? a : b;
  }
}

// Integers wrap: computed modulo 2^64 and cut off, except for comparisons.
template <typename T>
void integers(int op, double scale, void* into, const std::vector<const void*>& from, size_t n) {
  const bool compares = op == FL_MIN || op == FL_MAX;
  for (size_t i = 0; i < n; ++i) {
    T value = read<T>(from[0], i);
    for (size_t r = 1; r < from.size(); ++r) {
      const T next = read<T>(from[r], i);
      if (op >= FL_AND) {
        value = bits<T>(op, value, next);
        continue;
      }
      const auto wide = combine<uint64_t>(op, static_cast<uint64_t>(value), static_cast<uint64_t>(next));
      value = compares ? combine<T>(op, value, next) : static_cast<T>(wide);
    }
    const auto factor = op >= FL_AND ? 1 : static_cast<uint64_t>(static_cast<int64_t>(scale));
    write<T>(into, i, static_cast<T>(static_cast<uint64_t>(value) * factor));
  }
}

// Any nonzero byte is true, and a bool ignores the scale.
void truths(int op, void* into, const std::vector<const void*>& from, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const auto is_true = [&](const void* at) { return static_cast<uint8_t>(read<uint8_t>(at, i) != 0); };
    uint8_t value = is_true(from[0]);
    for (size_t r = 1; r < from.size(); ++r) {
      const uint8_t next = is_true(from[r]);
      value = op >= FL_AND ? bits<uint8_t>(op, value, next) : combine<uint8_t>(op, value, next);
    }
    write<uint8_t>(into, i, value);
  }
}

template <typename T>
void floats(int op, double scale, void* into, const std::vector<const void*>& from, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    T value = read<T>(from[0], i);
    for (size_t r = 1; r < from.size(); ++r) value = combine(op, value, read<T>(from[r], i));
    write<T>(into, i, value * static_cast<T>(scale));
  }
}

template <int kExponent, int kMantissa>
void halves(int op, double scale, void* into, const std::vector<const void*>& from, size_t n) {
  const auto load = [&](size_t r, size_t i) {
    return widen(read<uint16_t>(from[r], i), kExponent, kMantissa);
  };
  for (size_t i = 0; i < n; ++i) {
    float value = load(0, i);
    for (size_t r = 1; r < from.size(); ++r) value = combine(op, value, load(r, i));
    write(into, i, narrow(value * static_cast<float>(scale), kExponent, kMantissa));
  }
}

template <typename T>
void complexes(int op, double scale, void* into, const std::vector<const void*>& from, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    T re = read<T>(from[0], 2 * i), im = read<T>(from[0], 2 * i + 1);
    for (size_t r = 1; r < from.size(); ++r) {
      const T a = read<T>(from[r], 2 * i), b = read<T>(from[r], 2 * i + 1);
      const T new_re = op == FL_SUM ? re + a : re * a - im * b;
      im = op == FL_SUM ? im + b : re * b + im * a;
      re = new_re;
    }
    write(into, 2 * i, re * static_cast<T>(scale));
    write(into, 2 * i + 1, im * static_cast<T>(scale));
  }
}

// Exponent width of a floating dtype's real numbers; 0 for integers and long double.
int exponent_bits(int dtype) {
  switch (dtype) {
    case FL_FLOAT16: return 5;
    case FL_BFLOAT16:
    case FL_FLOAT32:
    case FL_COMPLEX64: return 8;
    case FL_FLOAT64:
    case FL_COMPLEX128: return 11;
    default: return 0;
  }
}

long double special_or_plain(Random& random) {
  const long double specials[] = {0.0L,      -0.0L,    1.0L,     -1.0L,     INFINITY,
                                  -INFINITY, NAN,      0x1p-24L, 0x1p-149L, 65504.0L,
                                  65519.0L,  65520.0L, 1e38L,    -1e308L};
  if (random.one_in(64)) return specials[random.below(sizeof specials / sizeof *specials)];
  const auto mantissa = static_cast<long double>(static_cast<int64_t>(random.bits()));
  return std::ldexp(mantissa, -63 + static_cast<int>(random.below(9)) - 4);
}

void write_real(int dtype, void* data, size_t i, long double value) {
  switch (dtype) {
    case FL_FLOAT16: return write(data, i, narrow_float16(static_cast<float>(value)));
    case FL_BFLOAT16: return write(data, i, narrow_bfloat16(static_cast<float>(value)));
    case FL_FLOAT32:
    case FL_COMPLEX64: return write(data, i, static_cast<float>(value));
    case FL_FLOAT64:
    case FL_COMPLEX128: return write(data, i, static_cast<double>(value));
    default: return write(data, i, value);
  }
}

bool is_nan(int dtype, const char* at) {
  const int exponent = exponent_bits(dtype), bytes = info_of(dtype).value_bytes;
  if (exponent == 0) return !is_integer(dtype) && std::isnan(read<long double>(at, 0));
  uint64_t bits = 0;
  std::memcpy(&bits, at, bytes);
  const uint64_t magnitude = bits & ((uint64_t{1} << (8 * bytes - 1)) - 1);
  return magnitude > ((uint64_t{1} << exponent) - 1) << (8 * bytes - 1 - exponent);
}

}  // namespace

const DTypeInfo& info_of(int dtype) { return kInfo[dtype]; }

bool is_integer(int dtype) { return dtype <= FL_UINT64; }

bool goes_together(int dtype, int op) {
  if (op >= FL_AND) return is_integer(dtype);
  if (dtype == FL_BOOL) return op == FL_MIN || op == FL_MAX;
  return info_of(dtype).parts == 1 || op == FL_SUM || op == FL_PROD;
}

uint16_t narrow_float16(float value) { return narrow(value, 5, 10); }
uint16_t narrow_bfloat16(float value) { return narrow(value, 8, 7); }

void fill_bits(int dtype, Random& random, void* data, size_t count) {
  char* at = static_cast<char*>(data);
  const size_t bytes = count * info_of(dtype).itemsize;
  for (size_t i = 0; i < bytes; i += 8) {
    const uint64_t bits = random.bits();
    std::memcpy(at + i, &bits, std::min<size_t>(8, bytes - i));
  }
  if (dtype == FL_BOOL) {
    for (size_t i = 0; i < count; ++i) at[i] = at[i] & 1 ? at[i] : 0;  // half of them false
  }
}

void fill(int dtype, Random& random, void* data, size_t count) {
  if (is_integer(dtype)) return fill_bits(dtype, random, data, count);
  const size_t reals = count * info_of(dtype).parts;
  if (exponent_bits(dtype) == 0) std::memset(data, 0, count * info_of(dtype).itemsize);
  for (size_t i = 0; i < reals; ++i) write_real(dtype, data, i, special_or_plain(random));
}

void reference(int dtype, int op, double scale, void* into, const std::vector<const void*>& from, size_t count) {
  if (dtype == FL_BOOL) return truths(op, into, from, count);
  using Combine = void (*)(int, double, void*, const std::vector<const void*>&, size_t);
  static const Combine combine_from_int8_on[] = {
      integers<int8_t>, integers<int16_t>, integers<int32_t>, integers<int64_t>, integers<uint8_t>, integers<uint16_t>,
      integers<uint32_t>, integers<uint64_t>, halves<5, 10>, halves<8, 7>, floats<float>, floats<double>,
      floats<long double>, complexes<float>, complexes<double>, complexes<long double>};
  combine_from_int8_on[dtype - FL_INT8](op, scale, into, from, count);
}

std::string difference(int dtype, const void* got, const void* wanted, size_t count, bool any_nan) {
  const DTypeInfo& info = info_of(dtype);
  const int step = info.itemsize / info.parts;
  const char *a = static_cast<const char*>(got), *b = static_cast<const char*>(wanted);
  if (count == 0) return "";
  if (step == info.value_bytes && std::memcmp(a, b, count * info.itemsize) == 0) return "";
  for (size_t i = 0; i < count * info.parts; ++i, a += step, b += step) {
    if (std::memcmp(a, b, info.value_bytes) == 0) continue;
    if (dtype == FL_BOOL && *a != 0 && *b != 0) continue;  // both bytes are true
    if (any_nan && is_nan(dtype, a) && is_nan(dtype, b)) continue;
    std::string text = std::string(info.name) + " number " + std::to_string(i) + " of " +
                       std::to_string(count * info.parts) + ": got 0x";
    const auto hex = [&](const char* at) {
      for (int k = info.value_bytes; k-- > 0;) {
        text += "0123456789abcdef"[static_cast<uint8_t>(at[k]) >> 4];
        text += "0123456789abcdef"[at[k] & 15];
      }
    };
    hex(a);
    text += ", wanted 0x";
    hex(b);
    return text;
  }
  return "";
}

}  // namespace stress
