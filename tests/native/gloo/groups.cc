#include <algorithm>

#include "world.h"

namespace stress {

void play_threads(Rank& rank) {
  constexpr size_t kCounts[] = {0, 1000, 20000, 200000};
  const int next = (rank.rank + 1) % rank.size, last = (rank.rank + rank.size - 1) % rank.size;
  std::vector<std::thread> threads;
  for (int tag = 0; tag < 4; ++tag) {
    const auto exchange = [&rank, tag, count = kCounts[tag]](int verb, int peer) {
      for (uint32_t i = 0; i < 3; ++i) {
        Array array(count, verb == FL_SEND ? i + rank.rank : 0);
        check_ok(rank.run(signature_of(verb, count, tag), array.data(), nullptr, peer, false), "a message");
        if (verb == FL_RECV) check(array == Array(count, i + peer), "a message with wrong contents");
      }
    };
    threads.emplace_back(exchange, FL_SEND, next);
    threads.emplace_back(exchange, FL_RECV, last);
  }
  for (std::thread& thread : threads) thread.join();
}

void play_parts(Rank& rank, const std::vector<Part>& parts, const Script& beside) {
  std::vector<std::thread> threads;
  for (const Part& part : parts) {
    if (std::find(part.ranks.begin(), part.ranks.end(), rank.rank) == part.ranks.end()) continue;
    threads.emplace_back([&rank, &part] {
      Rank own = rank.part(part.ranks, part.number);
      own.play(part.script);
      play_the_end(own, Random(part.number));
    });
  }
  rank.play(beside);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace stress
