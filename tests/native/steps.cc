// Kernels of csrc/optim: every instruction set of this processor gives the same bits on arrays with any begin
// and end, and changes nothing outside them.
#include "kernels.h"

#include <cstring>
#include <memory>
#include <vector>

#include "../../csrc/optim/optim.h"
#include "check.h"
#include "random.h"

namespace stress {
namespace {

// `count` elements at any element-aligned address that end with the allocation.
template <typename R>
struct Elements {
  std::unique_ptr<R[]> memory;
  R* data;
  size_t count;

  Elements(size_t size, Random& random) : count(size) {
    const size_t skip = random.below(4);
    memory.reset(new R[skip + count]);
    data = memory.get() + skip;
    for (size_t i = 0; i < count; ++i) data[i] = R(double(random.below(2000)) / 1000 - 1);
  }

  Elements(const Elements& other, Random& random) : Elements(other.count, random) {
    if (count > 0) std::memcpy(data, other.data, count * sizeof(R));
  }

  bool operator==(const Elements& other) const {
    return count == 0 || std::memcmp(data, other.data, count * sizeof(R)) == 0;
  }
};

template <typename R>
using Arrays = std::vector<Elements<R>>;

template <typename R>
Arrays<R> copies(const Arrays<R>& of, Random& random) {
  Arrays<R> made;
  for (const Elements<R>& each : of) made.emplace_back(each, random);
  return made;
}

template <typename R>
void one_step(int rule, Random& random) {
  const size_t around[] = {0, 8, 16, 64, 2048, 4096};
  const size_t count = random.one_in(2) ? random.below(5000) : around[random.below(6)] + random.below(2);
  const double scale = random.one_in(2) ? 1.0 : 1.0 / 3;
  Arrays<R> start;  // the parameter, the gradient, the states
  for (int i = 0; i < 2 + fl::optim::MOST_STATES; ++i) start.emplace_back(count, random);
  for (size_t i = 0; i < count * fl::optim::MOST_STATES; ++i) {
    R& state = start[2 + i / count].data[i % count];
    state = state < 0 ? -state : state;  // means of squares
  }
  double numbers[fl::optim::MOST_NUMBERS];
  for (double& number : numbers) number = double(1 + random.below(999)) / 1000;

  std::unique_ptr<Arrays<R>> baseline;
  double squares = 0;
  for (const char* name : {"baseline", "avx2", "avx512"}) {
    if (!fl::optim::choose(name)) continue;
    const fl::optim::Set& set = fl::optim::chosen_set();
    situation() = std::string(name) + ", " + set.rules[rule].name + ", " + std::to_string(count) + " elements";
    Arrays<R> arrays = copies(start, random);
    fl::optim::Piece piece{arrays[0].data, arrays[1].data, {}, count};
    for (int i = 0; i < fl::optim::MOST_STATES; ++i) {
      piece.states[i] = i < set.rules[rule].states ? arrays[2 + i].data : arrays[0].data;
    }
    constexpr bool is_double = sizeof(R) == sizeof(double);
    (is_double ? set.rules[rule].float64 : set.rules[rule].float32)(piece, numbers, scale);
    check(arrays[1] == start[1], "a gradient has changed");
    const double sum = (is_double ? set.float64 : set.float32)(start[1].data, count);
    if (baseline == nullptr) {
      baseline = std::make_unique<Arrays<R>>(std::move(arrays));
      squares = sum;
    }  else {
      check(arrays == *baseline, "other bits than the baseline's");
      check(sum == squares, "another sum of squares than the baseline's");
    }
  }
}

}  // namespace

long test_steps(uint64_t seed, long rounds) {
  long done = 0;
  for (long round = 0; round < rounds; ++round) {
    Random random(seed * 1000003 + round);
    for (int rule = 0; rule < fl::optim::RULES; ++rule, done += 2) {
      one_step<float>(rule, random);
      one_step<double>(rule, random);
    }
  }
  return done;
}

}  // namespace stress
