#include <algorithm>
#include <array>
#include <list>

#include "plays.h"

namespace stress {
namespace {

constexpr std::array<size_t, 7> kCounts{0, 1, 1000, 16384, 16385, 200000, 2200000};
constexpr std::array<int32_t, 4> kTags{0, 1, -7, 2147483647};

struct Letter {
  int from, to;
  int32_t tag;
  size_t count;
  uint64_t step;
};

struct Begun {
  Letter letter;
  Array array;
  fl_op* op = nullptr;
};

// Whom everybody writes to, in the order of their tags.
std::vector<Letter> letters(int ranks, Random& random, uint64_t step) {
  std::vector<Letter> all;
  const size_t number = 1 + random.below(8);
  for (size_t i = 0; i < number; ++i) {
    const int from = static_cast<int>(random.below(ranks));
    const int to = static_cast<int>((from + 1 + random.below(ranks - 1)) % ranks);
    all.push_back({from, to, kTags[random.below(kTags.size())], kCounts[random.below(kCounts.size())], step + i});
  }
  return all;
}

fl_message message_of(const Rank& rank, Begun& one) {
  const bool sends = one.letter.from == rank.rank;
  return {signature_of(sends ? FL_SEND : FL_RECV, one.letter.count, one.letter.tag),
          one.array.data(), sends ? one.letter.to : one.letter.from, {}, nullptr};
}

void check_received(const Rank& rank, const Begun& one) {
  if (one.letter.to != rank.rank) return;
  check(one.array == values(one.letter.step, one.letter.from, one.letter.count), "a message with wrong contents");
}

void all_begun(Rank& rank, std::list<Begun>& own) {
  for (Begun& one : own) {
    const fl_message message = message_of(rank, one);
    one.op = rank.run(message.signature, message.data, nullptr, message.peer, true);
  }
  for (Begun& one : own) check_ok(one.op, "a message that was begun");
}

void exchanged(Rank& rank, std::list<Begun>& own) {
  std::vector<fl_message> messages;
  for (Begun& one : own) messages.push_back(message_of(rank, one));
  std::vector<fl_op*> results;
  rank.exchange(messages, rank.rank % 2 == 1, results);
  for (fl_op* op : results) check_ok(op, "an exchange");
}

// Each tag and direction on a thread of its own, which waits for each message.
void on_threads(Rank& rank, std::list<Begun>& own) {
  std::vector<std::thread> threads;
  for (const int peer_and_way : {0, 1}) {
    for (int peer = 0; peer < rank.size; ++peer) {
      for (const int32_t tag : kTags) {
        threads.emplace_back([&rank, &own, peer_and_way, peer, tag] {
          for (Begun& one : own) {
            const fl_message message = message_of(rank, one);
            const int way = message.signature.verb == FL_SEND ? 1 : 0;
            if (way != peer_and_way || message.peer != peer || one.letter.tag != tag) continue;
            check_ok(rank.run(message.signature, message.data, nullptr, peer, false), "a message");
          }
        });
      }
    }
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

void play_messages(Rank& rank, Random& random, uint64_t step) {
  if (rank.size == 1) return;
  std::list<Begun> own;
  for (const Letter& letter : letters(rank.size, random, step)) {
    if (letter.from != rank.rank && letter.to != rank.rank) continue;
    const bool sends = letter.from == rank.rank;
    own.push_back({letter, sends ? values(letter.step, rank.rank, letter.count)
                                 : Array(letter.count, 12345u)});
  }
  Random mine(step * 64 + rank.rank);
  const uint64_t way = mine.below(4);
  Array beside(1000, 1);
  fl_op* collective = nullptr;
  const bool has_collective = random.one_in(2);
  const fl_signature sum = signature_of(FL_ALL_REDUCE, beside.size(), 0);
  if (has_collective) collective = rank.run(sum, beside.data(), nullptr, -1, true);
  if (way < 2) all_begun(rank, own);
  if (way == 2) exchanged(rank, own);
  if (way == 3) on_threads(rank, own);
  for (const Begun& one : own) check_received(rank, one);
  check_ok(collective, "a collective beside messages");
  if (has_collective) check(beside[7] == static_cast<uint32_t>(rank.size), "a wrong sum");
}

void play_open_receives(Rank& rank, Random& random, uint64_t step) {
  const int to = static_cast<int>(random.below(rank.size));
  const auto tag = static_cast<int32_t>(1000 + step % 1000000);  // nothing else has it
  std::vector<size_t> counts, times;
  size_t number = 0, largest = 0;
  for (int r = 0; r < rank.size; ++r) {
    counts.push_back(kCounts[random.below(kCounts.size())]);
    times.push_back(r == to ? 0 : random.below(4));
    number += times[r];
    if (times[r] > 0) largest = std::max(largest, counts[r]);
  }
  const bool async = Random(step * 64 + rank.rank).one_in(2);
  if (rank.rank != to) {
    Array data = values(step, rank.rank, counts[rank.rank]);
    std::vector<fl_op*> begun;
    for (size_t i = 0; i < times[rank.rank]; ++i) {
      begun.push_back(rank.run(signature_of(FL_SEND, data.size(), tag), data.data(), nullptr, to, async));
    }
    for (fl_op* op : begun) check_ok(op, "a message to who knows nothing of it");
    return;
  }
  struct Open {
    Array array;
    fl_match match{-1, 1, 0, -1.0, nullptr};
    fl_op* op = nullptr;
  };
  std::list<Open> own(number);
  for (Open& one : own) {
    one.array.resize(largest);
    one.op = rank.run(signature_of(FL_RECV, largest, tag), one.array.data(), &one.match, -1, async);
  }
  for (Open& one : own) {
    check_ok(one.op, "a receive from any rank");
    const int from = one.match.source;
    check(from >= 0 && times[from]-- > 0, "a message too many of a rank");
    check(one.match.rows == static_cast<int64_t>(counts[from]), "a wrong number of rows");
    one.array.resize(counts[from]);
    check(one.array == values(step, from, counts[from]), "a message with wrong contents");
  }
}

}  // namespace stress
