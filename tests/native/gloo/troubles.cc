#include <algorithm>
#include <array>
#include <chrono>

#include "world.h"

namespace stress {
namespace {

constexpr std::array<size_t, 5> kCounts{0, 5, 20000, 20001, 2300000};
constexpr size_t kLarge = 16385;  // more than travels with the call

}  // namespace

void play_threads(Rank& rank) {
  constexpr size_t kLengths[] = {0, 1000, 20000, 200000};
  const int next = (rank.rank + 1) % rank.size, last = (rank.rank + rank.size - 1) % rank.size;
  std::vector<std::thread> threads;
  for (int tag = 0; tag < 4; ++tag) {
    const auto exchange = [&rank, tag, count = kLengths[tag]](int verb, int peer) {
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

// Begin with a barrier, because a receive from any rank raises if a rank has left.
void play_the_end(Rank& rank, Random random) {
  check_ok(rank.run(signature_of(FL_BARRIER, 0, 0), nullptr, nullptr, -1, false), "a barrier");
  if (rank.size == 1 || random.one_in(3)) return;
  const bool is_late = random.one_in(2);
  const int victim = static_cast<int>(random.below(rank.size));
  const size_t count = kCounts[random.below(kCounts.size())];
  if (rank.rank == victim) {
    if (is_late) std::this_thread::sleep_for(std::chrono::milliseconds(700));
    return;  // and leave
  }
  if (is_late) rank.seconds = 0.3;
  Array sum(count), message(count), other(count), any(count);
  fl_match match{-1, 1, 0, -1.0, nullptr};
  std::vector<fl_op*> begun{
      rank.run(signature_of(FL_ALL_REDUCE, count, 0), sum.data(), nullptr, -1, true),
      rank.run(signature_of(FL_SEND, count, 1), message.data(), nullptr, victim, true),
      rank.run(signature_of(FL_RECV, count, 1), other.data(), nullptr, victim, true),
      rank.run(signature_of(FL_RECV, count, 1), other.data(), nullptr, victim, true),
      rank.run(signature_of(FL_RECV, count, 9), any.data(), &match, -1, true)};
  if (Random(count + rank.rank).one_in(2)) {
    Array last(count);
    const auto mine = signature_of(FL_RECV, count, 2);
    check(ended(rank.run(mine, last.data(), nullptr, victim, false)) != FL_OK, "an end");
  } else if (Random(count + rank.rank).one_in(3)) {
    rank.close();  // with all operations pending
  }
  for (size_t i = 0; i < begun.size(); ++i) {
    const fl_status status = ended(begun[i]);
    const bool has_gone = i == 1 && count < kLarge && status == FL_OK;  // a small send to a late rank
    check(has_gone || status == FL_PEER_LOST || status == FL_TIMEOUT || status == FL_CLOSED, "another end");
  }
}

}  // namespace stress
