// Expected results of reductions: plain loops, independent of csrc/reduce.
#pragma once

#include <string>
#include <vector>

#include "../../csrc/reduce/reduce.h"
#include "random.h"

namespace stress {

constexpr int kDTypes = FL_MOVED;

struct DTypeInfo {
  const char* name;
  int itemsize;
  int value_bytes;  // of each real number; long double is padded
  int parts;        // real numbers in an element
};

const DTypeInfo& info_of(int dtype);
bool goes_together(int dtype, int op);
bool is_integer(int dtype);

// Values whose sums and products round, with occasional special values.
void fill(int dtype, Random& random, void* data, size_t count);
// Arbitrary bits.
void fill_bits(int dtype, Random& random, void* data, size_t count);

void reference(int dtype, int op, double scale, void* into, const std::vector<const void*>& from, size_t count);

uint16_t narrow_float16(float value);
uint16_t narrow_bfloat16(float value);

// Return "" if the bits are equal (`any_nan`: all NaNs are equal), else a description of the first
// difference.
std::string difference(int dtype, const void* got, const void* wanted, size_t count, bool any_nan);

}  // namespace stress
