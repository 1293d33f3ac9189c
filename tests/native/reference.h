// What reductions must give: plain loops that share nothing with csrc/reduce but the contract.
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
  int value_bytes;  // of each real number; long double has padding behind it
  int parts;        // real numbers in an element
};

const DTypeInfo& info_of(int dtype);
bool goes_together(int dtype, int op);
bool is_integer(int dtype);

// Values whose sums and products round, and now and then a special one.
void fill(int dtype, Random& random, void* data, size_t count);
// Any bits at all.
void fill_bits(int dtype, Random& random, void* data, size_t count);

void reference(int dtype, int op, double scale, void* into, const std::vector<const void*>& from, size_t count);

uint16_t narrow_float16(float value);
uint16_t narrow_bfloat16(float value);

// Equal bits; where `any_nan`, a NaN equals every other. Else what differs, and where.
std::string difference(int dtype, const void* got, const void* wanted, size_t count, bool any_nan);

}  // namespace stress
