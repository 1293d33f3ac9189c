// Elementwise loops that NumPy has inside its casts and functions, out of reach: in the form of those
// that its ufuncs have.

#include <cstring>
#include <string>
#include <type_traits>
#include <unordered_map>

#include "tape.h"

namespace fl::tape {
namespace {

#define FL_KERNELS "csrc/tape/kernels.inc"
#include "../common/each_set.inc"

template <typename From, typename To>
void cast_loop(char** args, const intptr_t* count, const intptr_t* steps, void*) {
#define FL_CAST cast<From, To>
  static const auto kernel = FL_CHOSEN(FL_CAST);
#undef FL_CAST
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

template <typename R>
class AddRows final : public Instruction {
 public:
  AddRows(int from, int to, intptr_t rows, intptr_t columns, intptr_t row_step)
      : from_(from), to_(to), rows_(rows), columns_(columns), row_step_(row_step) {}

  Outcome run(Table table) override {
    static const auto kernel = FL_CHOSEN(add_rows<R>);
    R* to = reinterpret_cast<R*>(table[to_]);
    std::memset(to, 0, static_cast<size_t>(columns_) * sizeof(R));
    kernel(reinterpret_cast<const R*>(table[from_]), rows_, columns_, row_step_, to);
    return Outcome::done;
  }

  int64_t work() const override { return rows_ * columns_; }

 private:
  int from_, to_;
  intptr_t rows_, columns_, row_step_;
};

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

template <typename From, typename To>
void add_cast(Loops* loops, const char* from, const char* to) {
  (*loops)[std::string("cast:") + from + ":" + to] = cast_loop<From, To>;
}

template <typename From>
void add_casts(Loops* loops, const char* from) {
  add_cast<From, bool>(loops, from, "b1");
  add_cast<From, int8_t>(loops, from, "i1");
  add_cast<From, int16_t>(loops, from, "i2");
  add_cast<From, int32_t>(loops, from, "i4");
  add_cast<From, int64_t>(loops, from, "i8");
  add_cast<From, float>(loops, from, "f4");
  add_cast<From, double>(loops, from, "f8");
}

template <size_t size>
void add_sized(Loops* loops) {
  (*loops)["copy:" + std::to_string(size)] = copy_loop<size>;
  (*loops)["where:" + std::to_string(size)] = where_loop<size>;
}

Loops all_loops() {
  Loops loops;
  add_casts<bool>(&loops, "b1");
  add_casts<uint8_t>(&loops, "u1");
  add_casts<int8_t>(&loops, "i1");
  add_casts<int16_t>(&loops, "i2");
  add_casts<int32_t>(&loops, "i4");
  add_casts<int64_t>(&loops, "i8");
  add_cast<float, double>(&loops, "f4", "f8");
  add_cast<double, float>(&loops, "f8", "f4");
  add_cast<float, bool>(&loops, "f4", "b1");
  add_cast<double, bool>(&loops, "f8", "b1");
  add_sized<1>(&loops);
  add_sized<2>(&loops);
  add_sized<4>(&loops);
  add_sized<8>(&loops);
  add_sized<16>(&loops);
  return loops;
}

}  // namespace

std::unique_ptr<Instruction> add_rows(bool is_double, int from, int to, intptr_t rows,
                                      intptr_t columns, intptr_t row_step) {
  if (is_double) return std::make_unique<AddRows<double>>(from, to, rows, columns, row_step);
  return std::make_unique<AddRows<float>>(from, to, rows, columns, row_step);
}

Loop own_loop(const char* name) {
  static const Loops loops = all_loops();
  const auto found = loops.find(name);
  return found == loops.end() ? nullptr : found->second;
}

}  // namespace fl::tape
