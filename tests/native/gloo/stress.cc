// gloo_stress WORLDS [SEED [FIRST]]: random tests of csrc/gloo against its contract.
#include <signal.h>
#include <unistd.h>

#include "../calls.h"
#include "world.h"

namespace {

using namespace stress;

// Seconds that a world may take on a busy machine; a hanging world ends the program.
constexpr unsigned kPatience = 200;
constexpr int kCalls = 12, kParts = 3, kCallsOfAPart = 4;

// Return some ranks in random order.
std::vector<int> some_ranks(int size, Random& random) {
  std::vector<int> ranks;
  for (int r = 0; r < size; ++r) ranks.insert(ranks.begin() + random.below(r + 1), r);
  ranks.resize(2 + random.below(size - 1));
  return ranks;
}

void one_world(uint64_t seed) {
  alarm(kPatience);
  Random random(seed);
  random.one_in(2) ? setenv("FLASHLIGHT_CHECKS", "sync", 1) : unsetenv("FLASHLIGHT_CHECKS");
  // Occasionally enough ranks that calls are relayed.
  const int ranks = 2 + static_cast<int>(random.one_in(4) ? 7 + random.below(6) : random.below(4));
  const bool lazily = random.one_in(3);
  const size_t largest = ranks > 3 ? 700000 : random.one_in(4) ? 9000000 : 2000000;
  const auto written = [&](int size, int calls) {
    const Shape shape{size, 65 << 10, 64 << 10, 512 << 10, 4 << 20, {}};
    return Author(shape, Random(random.bits()), largest).write(calls);
  };
  const Script first = written(ranks, kCalls), beside = written(ranks, 2);
  std::vector<Part> parts;
  for (uint64_t number = 1; number <= kParts; ++number) {
    const std::vector<int> some = some_ranks(ranks, random);
    parts.push_back({some, written(static_cast<int>(some.size()), kCallsOfAPart), number});
  }
  situation() = "world of seed " + std::to_string(seed) + ", " + std::to_string(ranks) + " ranks";
  in_world(ranks, lazily, [&](Rank& rank) {
    rank.play(first);
    play_threads(rank);
    play_parts(rank, parts, beside);
    play_the_end(rank, Random(seed + 1));
  });
}

}  // namespace

int main(int count, char** arguments) {
  signal(SIGPIPE, SIG_IGN);  // as Python does
  const long worlds = count > 1 ? std::atol(arguments[1]) : 50;
  const uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
  const uint64_t first = count > 3 ? std::strtoull(arguments[3], nullptr, 10) : 0;
  for (long i = 0; i < worlds; ++i) one_world(seed * 1000000 + first + i);
  std::printf("%ld worlds, all right\n", worlds);
  return 0;
}
