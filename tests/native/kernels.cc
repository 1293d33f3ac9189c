// Kernels of csrc/reduce: every instruction set of this processor gives the same bits as the baseline, for
// arbitrary bits, and all agree with the reference.
#include <memory>

#include "../../csrc/reduce/sets.h"
#include "check.h"
#include "failures.h"
#include "reference.h"

namespace stress {
namespace {

struct Set {
  const char* name;
  fl::Kernel* kernel;
};

std::vector<Set> sets() {
  std::vector<Set> found{{"baseline", fl::baseline::reduce_all}};
#ifdef FL_SEVERAL_KERNELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    found.push_back({"avx2", fl::avx2::reduce_all});
  }
  if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq")) {
    found.push_back({"avx512", fl::avx512::reduce_all});
  }
#endif
  return found;
}

// `count` elements at any element-aligned address that end with the allocation.
struct Array {
  std::unique_ptr<char[]> memory;
  char* data;

  Array(int dtype, size_t count, Random& random) {
    const size_t item = info_of(dtype).itemsize, skip = random.below(4) * item;
    memory.reset(new char[skip + count * item]);
    data = memory.get() + skip;
  }
};

size_t some_count(Random& random) {
  const size_t around[] = {0, 8, 16, 32, 64, 1024, 2048};
  if (random.one_in(3)) return random.below(3000);
  const size_t count = around[random.below(7)] + random.below(3);
  return count == 0 ? 0 : count - 1;
}

std::string describe(const Set& set, int dtype, int op, int ranks, size_t count) {
  return std::string(set.name) + ", " + info_of(dtype).name + ", op " + std::to_string(op) + ", " +
         std::to_string(ranks) + " ranks, " + std::to_string(count) + " elements";
}

// Keep at most one NaN per index. Which of two NaNs an addition returns depends on the compiler, which may
// exchange the operands.
void leave_one_nan(int dtype, std::vector<Array>& inputs, size_t count) {
  const DTypeInfo& info = info_of(dtype);
  if (is_integer(dtype)) return;
  const size_t step = info.itemsize / info.parts;
  const std::vector<char> zeros(step);
  for (size_t i = 0; i < count * info.parts; ++i) {
    for (size_t r = 0; r < inputs.size(); ++r) {
      char* at = inputs[r].data + i * step;
      // Every all-ones exponent contains this byte; infinities are removed as well.
      const bool perhaps_nan = (at[info.value_bytes - 1] & 0x7c) == 0x7c;
      if (perhaps_nan && r != i % inputs.size()) std::memcpy(at, zeros.data(), step);
    }
  }
}

void one_reduction(int dtype, int op, Random& random) {
  const int ranks = 1 + static_cast<int>(random.below(9));
  const size_t count = some_count(random), item = info_of(dtype).itemsize;
  const bool arbitrary = random.one_in(2);
  const double scale = random.one_in(2) ? 1.0 : is_integer(dtype) ? -3.0 : 1.0 / 3;
  std::vector<Array> inputs;
  for (int r = 0; r < ranks; ++r) {
    inputs.emplace_back(dtype, count, random);
    (arbitrary ? fill_bits : fill)(dtype, random, inputs[r].data, count);
  }
  if (arbitrary) leave_one_nan(dtype, inputs, count);
  const int in_place = random.one_in(2) ? static_cast<int>(random.below(ranks)) : -1;
  std::vector<const void*> from(ranks);
  for (int r = 0; r < ranks; ++r) from[r] = inputs[r].data;

  std::vector<char> wanted(count * item), baseline;
  // The reference does not support extended numbers that no processor creates.
  const bool compares = !arbitrary || (dtype != FL_LONGDOUBLE && dtype != FL_CLONGDOUBLE);
  if (compares) reference(dtype, op, scale, wanted.data(), from, count);
  for (const Set& set : sets()) {
    Array output(dtype, count, random);
    std::vector<const void*> sources = from;
    if (in_place >= 0) {
      if (count > 0) std::memcpy(output.data, from[in_place], count * item);
      sources[in_place] = output.data;
    }
    situation() = describe(set, dtype, op, ranks, count);
    check(set.kernel(dtype, op, scale, output.data, sources.data(), ranks, count), "refused");
    std::string wrong;
    if (compares) wrong = difference(dtype, output.data, wanted.data(), count, true);
    if (wrong.empty() && !baseline.empty()) {
      const bool any_nan = !arbitrary || info_of(dtype).parts == 2;
      wrong = difference(dtype, output.data, baseline.data(), count, any_nan);
    }
    check(wrong.empty(), wrong);
    if (baseline.empty()) baseline.assign(output.data, output.data + count * item);
  }
}

// Every float16 and bfloat16, widened and narrowed, in one array.
void all_halves() {
  std::vector<uint16_t> all(65536), baseline(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (int dtype : {FL_FLOAT16, FL_BFLOAT16}) {
    for (double scale : {1.0, 0.5, 1.0 / 3, 0x1p-10, 1e6}) {
      for (int ranks : {1, 2, 5}) {  // maximum of equal arrays: every path of the kernels
        const std::vector<const void*> from(ranks, all.data());
        std::vector<uint16_t> wanted(65536), got(65536);
        reference(dtype, FL_MAX, scale, wanted.data(), from, all.size());
        for (const Set& set : sets()) {
          situation() = describe(set, dtype, FL_MAX, ranks, all.size());
          set.kernel(dtype, FL_MAX, scale, got.data(), from.data(), ranks, all.size());
          std::string wrong = difference(dtype, got.data(), wanted.data(), all.size(), true);
          if (set.kernel == fl::baseline::reduce_all) baseline = got;
          if (wrong.empty())
            wrong = difference(dtype, got.data(), baseline.data(), all.size(), false);
          check(wrong.empty(), wrong + ", scale " + std::to_string(scale));
        }
      }
    }
  }
}

// Floats of every exponent, just below, at and above each tie.
void narrowing() {
  const uint32_t tails[] = {0,      1,      0xfff,  0x1000, 0x1001, 0x1fff, 0x2fff, 0x3000,
                            0x3001, 0x7fff, 0x8000, 0x8001, 0xefff, 0xf000, 0xf001, 0xffff};
  for (uint32_t high = 0; high < 65536; ++high) {
    for (uint32_t low : tails) {
      const float value = fl::float_of(high << 16 | low);
      if (value != value) continue;
      situation() = "narrowing of " + std::to_string(value);
      check(fl::Float16::narrow(value).bits == narrow_float16(value), "float16 is wrong");
      check(fl::Bfloat16::narrow(value).bits == narrow_bfloat16(value), "bfloat16 is wrong");
    }
  }
}

bool is_op(int op) { return op >= 0 && op <= FL_XOR && op != 4; }  // 4: Python's average

void refusals() {
  char byte = 0;
  const void* from[] = {&byte};
  for (const Set& set : sets()) {
    for (int dtype = -1; dtype <= kDTypes; ++dtype) {
      for (int op = -1; op <= 8; ++op) {
        const bool known = dtype >= 0 && dtype < kDTypes && is_op(op) && goes_together(dtype, op);
        check(set.kernel(dtype, op, 1.0, &byte, from, 1, 0) == known, "accepted or refused wrongly");
      }
    }
  }
}

}  // namespace

long test_kernels(uint64_t seed, long rounds) {
  refusals();
  narrowing();
  all_halves();
  long done = 0;
  for (long round = 0; round < rounds; ++round) {
    Random random(seed * 1000003 + round);
    for (int dtype = 0; dtype < kDTypes; ++dtype) {
      for (int op = 0; op < 4; ++op) {
        if (!goes_together(dtype, op)) continue;
        one_reduction(dtype, op, random);
        ++done;
      }
    }
  }
  return done;
}

}  // namespace stress
