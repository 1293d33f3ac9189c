// gloo_stress WORLDS [SEED [FIRST]]: what csrc/gloo does, at random, against what it promises.
#include <signal.h>
#include <unistd.h>

#include "plays.h"

namespace {

using namespace stress;

// Seconds that a world may take, however busy the machine; one that hangs ends the program.
constexpr unsigned kPatience = 200;
constexpr int kSteps = 12;

void one_world(uint64_t seed) {
  alarm(kPatience);
  Random chosen(seed);
  // So many that what they call goes by others, now and then.
  const int ranks = 2 + static_cast<int>(chosen.one_in(4) ? 7 + chosen.below(6) : chosen.below(4));
  const bool lazily = chosen.one_in(3);
  situation() = "world of seed " + std::to_string(seed) + ", " + std::to_string(ranks) + " ranks";
  in_world(ranks, lazily, [seed](Rank& rank) {
    Random random(seed + 1);  // the same on every rank
    for (int i = 0; i < kSteps; ++i) {
      const uint64_t step = seed * 1000 + i * 20, kind = random.below(10);
      if (kind < 4) play_collective(rank, random, step);
      if (kind >= 4 && kind < 7) play_messages(rank, random, step);
      if (kind == 7) play_mismatches(rank, random, step);
      if (kind == 8) play_open_receives(rank, random, step);
      if (kind == 9) play_groups(rank, random, step);
    }
    play_the_end(rank, random);
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
