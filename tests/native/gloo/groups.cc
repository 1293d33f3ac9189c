#include <algorithm>

#include "plays.h"

namespace stress {
namespace {

constexpr int kGroups = 3, kPlays = 3;

// Some ranks in any order, the same on every rank.
std::vector<int> some_ranks(int size, Random& random) {
  std::vector<int> ranks;
  for (int r = 0; r < size; ++r) ranks.insert(ranks.begin() + random.below(r + 1), r);
  ranks.resize(2 + random.below(size - 1));
  return ranks;
}

// Ends as worlds do, while other groups go on.
void play_in(Rank& rank, uint64_t step) {
  Random random(step);
  for (int i = 0; i < kPlays; ++i) {
    const uint64_t kind = random.below(5);
    if (kind < 2) play_collective(rank, random, step + i);
    if (kind == 2) play_messages(rank, random, step + i);
    if (kind == 3) play_mismatches(rank, random, step + i);
    if (kind == 4) play_open_receives(rank, random, step + i);
  }
  play_the_end(rank, random);
}

}  // namespace

void play_groups(Rank& rank, Random& random, uint64_t step) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kGroups; ++i) {
    const std::vector<int> ranks = some_ranks(rank.size, random);
    if (std::find(ranks.begin(), ranks.end(), rank.rank) == ranks.end()) continue;
    const uint64_t number = step + i + 1;
    threads.emplace_back([&rank, ranks, number] {
      Rank part = rank.part(ranks, number);
      play_in(part, number * 7);
    });
  }
  play_collective(rank, random, step);
  for (std::thread& thread : threads) thread.join();
  play_messages(rank, random, step);
}

}  // namespace stress
