// Messages in the model, and groups that are created, left and closed.

#include "member.h"

namespace {

using namespace model;

// Numbers of 4-byte elements: in the record; beside it; with the offer and after it.
constexpr size_t kTiny = 2, kEager = 12, kOffered = 70;

int32_t value(int from, int number, size_t k) { return 1000 * (from + 1) + 100 * number + static_cast<int32_t>(k); }

// One message. Its data is unused after its end.
struct Letter {
  Member& me;
  const int verb, peer, number;
  fl_signature s;
  std::vector<int32_t> data;
  fl_match match{-1, 0, 0, -1.0, nullptr};

  Letter(Member& me, int verb, size_t count, int peer, int number, int tag = 5)
      : me(me), verb(verb), peer(peer), number(number), s(signature(verb, count)), data(count, -1) {
    s.root = tag;
    for (size_t k = 0; verb == FL_SEND && k < count; ++k) data[k] = value(me.rank, number, k);
  }

  // A receive from any rank determines the source.
  void* out() { return verb == FL_RECV && peer < 0 ? &match : nullptr; }
  fl::Handle run(double seconds = kForever) { return me.group->run({s, data.data(), out(), peer, seconds, &kHere}); }
  fl::Handle start() { return me.group->start({s, data.data(), out(), peer, kForever, &kHere}); }
  fl_message message() { return {s, data.data(), peer, kHere, nullptr}; }

  bool end(const fl::Handle& handle) {
    const bool goes_on = me.settle(outcome_of(handle));
    const int from = peer < 0 ? match.source : peer;
    for (size_t k = 0; goes_on && verb == FL_RECV && k < data.size(); ++k) {
      const int32_t wanted = value(from, number < 0 ? 0 : number, k);
      if (data[k] != wanted) {
        fail("element " + std::to_string(k) + " of message " + std::to_string(number) + " is " +
             std::to_string(data[k]) + " instead of " + std::to_string(wanted));
      }
    }
    for (int32_t& one : data) one = -2;
    return goes_on;
  }
};

// From rank 0 to rank 1 in sequence; `wait`: the sender waits for their arrival.
template <size_t count, int messages>
void one_way(Member& me) {
  for (int i = 0; i < messages; ++i) {
    Letter* const letter = new Letter(me, me.rank == 0 ? FL_SEND : FL_RECV, count, 1 - me.rank, i);
    if (!letter->end(letter->run())) return;
  }
}

// A message to the other rank and one back.
template <size_t count>
void ping_pong(Member& me) {
  for (int i = 0; i < 2; ++i) {
    Letter* const letter = new Letter(me, (me.rank == 0) == (i == 0) ? FL_SEND : FL_RECV, count, 1 - me.rank, i);
    if (!letter->end(letter->run())) return;
  }
}

// Both ranks send to each other and receive at the same time.
template <size_t count, bool starts>
void exchange(Member& me) {
  Letter* const there = new Letter(me, FL_SEND, count, 1 - me.rank, 0);
  Letter* const back = new Letter(me, FL_RECV, count, 1 - me.rank, 0);
  const fl_message messages[] = {there->message(), back->message()};
  const auto handles = me.group->exchange(messages, 2, kForever, starts);
  if (there->end(handles[0])) back->end(handles[1]);
}

// Two ranks send to rank 0, which receives from any rank.
void any_source(Member& me) {
  if (me.rank > 0) {
    Letter* const letter = new Letter(me, FL_SEND, kTiny, 0, 0);
    letter->end(letter->run());
    return;
  }
  int seen = 0;
  for (int i = 0; i < 2; ++i) {
    Letter* const letter = new Letter(me, FL_RECV, kTiny, -1, 0);
    if (!letter->end(letter->run())) return;
    check((seen & 1 << letter->match.source) == 0, "two messages of a rank that has sent one");
    seen |= 1 << letter->match.source;
  }
}

// Started and waited for in reverse order; no thread of a rank waits meanwhile.
template <size_t count>
void started(Member& me) {
  Letter* letters[2];
  fl::Handle* const handles = new fl::Handle[2];
  for (int i = 0; i < 2; ++i) {
    letters[i] = new Letter(me, me.rank == 0 ? FL_SEND : FL_RECV, count, 1 - me.rank, i, i);
    handles[i] = letters[i]->start();
  }
  for (int i = 2; i-- > 0;) {
    if (!letters[i]->end(handles[i])) return;
  }
}

// Two threads of a rank with one message each.
void in_two_threads(Member& me) {
  Letter* const letters[] = {new Letter(me, me.rank == 0 ? FL_SEND : FL_RECV, kTiny, 1 - me.rank, 0, 0),
                             new Letter(me, me.rank == 0 ? FL_RECV : FL_SEND, kTiny, 1 - me.rank, 1, 1)};
  std::thread other([&] { letters[1]->end(letters[1]->run()); });
  letters[0]->end(letters[0]->run());
  other.join();
}

// Two threads receive from the other rank, in sequence or concurrently: each may end the other's message.
template <size_t count, bool at_once = false>
void two_receivers(Member& me) {
  if (me.rank == 0 && at_once) return started<count>(me);
  if (me.rank == 0) {
    for (int i = 0; i < 2; ++i) {
      Letter* const letter = new Letter(me, FL_SEND, count, 1, i, i);
      if (!letter->end(letter->run())) return;
    }
    return;
  }
  Letter* const letters[] = {new Letter(me, FL_RECV, count, 0, 0, 0), new Letter(me, FL_RECV, count, 0, 1, 1)};
  std::thread other([&] { letters[1]->end(letters[1]->run()); });
  letters[0]->end(letters[0]->run());
  other.join();
}

// One of two receives that share a claim gets the message; a wait for either one ends then.
void claimed(Member& me) {
  if (me.rank == 0) {
    Letter* const letter = new Letter(me, FL_SEND, kTiny, 1, 0, 0);
    letter->end(letter->run());
    return;
  }
  int32_t* const claim = new int32_t(0);
  Letter* const letters[] = {new Letter(me, FL_RECV, kTiny, -1, 0, 0), new Letter(me, FL_RECV, kTiny, -1, 0, 1)};
  fl::Handle* const handles = new fl::Handle[2];
  for (int i = 0; i < 2; ++i) {
    letters[i]->match.claim = claim;
    handles[i] = letters[i]->start();
  }
  constexpr int64_t kSlice = 50000000;
  while (__atomic_load_n(claim, __ATOMIC_RELAXED) == 0) {
    fl::futex_wait(claim, 0, kSlice, fl::kAllBits, fl::FutexScope::kThreads);
  }
  handles[1]->cancel();
  check(outcome_of(handles[1]).status == FL_OK && letters[1]->match.source < 0, "two receives have one message");
  letters[0]->end(handles[0]);
}

// No thread sleeps forever: neither a waiter whose group ends, nor the thread that checks waits.
void freed_while_it_ticks(Member& me) {
  if (me.rank == 1) return;
  Letter* const letter = new Letter(me, FL_RECV, kTiny, 1, 0);
  const fl::Handle handle = letter->start();
  let_pass(one_of(5));
  free_group(me.group);
  check(outcome_of(handle).status == FL_CLOSED, "a message of a group that is closed has come");
}

// Only the ticking thread of rank 1 takes the offers of rank 0, also when it is about to sleep.
std::atomic<uint32_t>* taken;
void prepare_wound() { taken = static_cast<std::atomic<uint32_t>*>(shared(sizeof *taken)); }
void wound_again(Member& me) {
  for (uint32_t i = 0; i < 2; ++i) {
    Letter* const letter = new Letter(me, me.rank == 0 ? FL_SEND : FL_RECV, kOffered, 1 - me.rank,
                                      static_cast<int>(i));
    const fl::Handle handle = letter->start();
    if (me.rank == 1) {
      constexpr int64_t kSlice = 50000000;
      while (taken->load() == i) fl::futex_wait(taken, i, kSlice, fl::kAllBits, fl::FutexScope::kProcesses);
    }
    if (!letter->end(handle)) return;
    if (me.rank == 0) {
      taken->store(i + 1);
      fl::futex_wake(taken, fl::kAllBits, fl::FutexScope::kProcesses);
    }
  }
}

// Another thread closes the group of a running message; the other rank may have vanished.
void closed_with_a_message(Member& me) {
  if (me.rank == 1) {
    Letter* const letter = new Letter(me, FL_SEND, kTiny, 0, 0, 6);
    const Outcome outcome = outcome_of(letter->run());
    const bool is_lost = outcome.status == FL_PEER_LOST && outcome.missing == std::vector<int>{0};
    check(outcome.status == FL_OK || is_lost,
          "a message to who has left ends with " + std::to_string(outcome.status));
    return;
  }
  Letter* const letter = new Letter(me, FL_RECV, kTiny, 1, 0, 7);
  std::thread other([&] {
    const Outcome outcome = outcome_of(letter->run());
    check(outcome.status == FL_CLOSED || (vanished() == 1 && outcome.status == FL_PEER_LOST),
          "a message of a group that is closed ends with " + std::to_string(outcome.status));
  });
  me.group->close();
  other.join();
}

// The same while the message is read from the other rank's memory.
void closed_while_it_reads(Member& me) {
  const int rank = me.rank;
  Letter* const letter = new Letter(me, rank == 0 ? FL_RECV : FL_SEND, kOffered, 1 - rank, 0);
  const auto run = [=] {
    const Outcome outcome = outcome_of(letter->run());
    const bool is_lost = outcome.status == FL_PEER_LOST && outcome.missing == std::vector<int>{1 - rank};
    check(outcome.status == FL_OK || (outcome.status == FL_CLOSED && rank == 0) || is_lost,
          "a message ends with " + std::to_string(outcome.status));
  };
  if (me.rank == 1) return run();
  std::thread other(run);
  me.group->close();
  other.join();
}

// The calls of both ends differ: the receiver raises, and the sender raises now or in its next call.
template <size_t count>
void mismatch(Member& me) {
  const bool sends = me.rank == 0;
  Letter* const letter = new Letter(me, sends ? FL_SEND : FL_RECV, sends ? count : count + 1, 1 - me.rank, 0);
  const Outcome outcome = outcome_of(letter->run());
  if (outcome.status != FL_MISMATCH && me.settle(outcome)) fail("a message that differs is not told of");
}

// A rank that vanishes before it has joined appears late to other ranks.
constexpr double kSeconds = 0.2;

bool barrier(Member& me, fl::ShmGroup* group) {
  fl_signature s = signature(FL_BARRIER, 0);
  s.ndim = s.itemsize = s.dtype = 0;
  return me.settle(outcome_of(group->run({s, nullptr, nullptr, -1, kSeconds, &kHere})), FL_TIMEOUT);
}

// All ranks create a group, use it and close it as soon as possible.
template <int ranks>
void whole_life(int rank) {
  fl::Mapping mapping = map(0, rank, fl::Segment::bytes_for(ranks));
  Member me(rank, ranks, static_cast<fl::ShmGroup*>(nullptr));
  begin();
  me.group = new fl::ShmGroup(std::move(mapping), rank, ranks);
  if (barrier(me, me.group)) free_group(me.group);
}

// also of a message that arrived in time
void leaves_after_a_message(Member& me) {
  Letter* const letter = new Letter(me, me.rank == 0 ? FL_SEND : FL_RECV, kEager, 1 - me.rank, 0);
  if (letter->end(letter->run())) free_group(me.group);
}

// One rank closes the group while the other rank waits for it.
void closed_by_other(Member& me) {
  if (me.rank == 0) {
    free_group(me.group);
    return;
  }
  fl_signature s = signature(FL_BARRIER, 0);
  const Outcome outcome = outcome_of(me.group->run({s, nullptr, nullptr, -1, kForever, &kHere}));
  check(outcome.status == FL_PEER_LOST && outcome.missing == std::vector<int>{0}, "who has left is not lost");
}

// A subgroup that is created, used and closed beside the group.
void part(int rank) {
  Member me(rank, 3, 0);
  fl::Mapping mapping;
  if (rank > 0) mapping = map(1, rank - 1, fl::Segment::bytes_for(2, false));
  begin();
  if (rank > 0) {
    Member mine(rank - 1, 2, new fl::ShmGroup(*me.group, std::move(mapping), rank - 1, {1, 2}, 7));
    mine.first = 1;
    Letter* const letter = new Letter(mine, rank == 1 ? FL_SEND : FL_RECV, kTiny, 2 - rank, 0);
    if (!mine.settle(outcome_of(letter->run(kSeconds)), FL_TIMEOUT)) return;
    if (!barrier(mine, mine.group)) return;
    free_group(mine.group);
  }
  barrier(me, me.group);
}

// A thread waits in a collective, which another thread closes.
void closed_meanwhile(Member& me) {
  if (me.rank == 1) return;
  std::thread other([&] {
    fl_signature s = signature(FL_BARRIER, 0);
    const Outcome outcome = outcome_of(me.group->run({s, nullptr, nullptr, -1, kForever, &kHere}));
    check(outcome.status == FL_CLOSED,
          "a call of a group that is closed ends with " + std::to_string(outcome.status));
  });
  me.group->close();
  other.join();
}

// A rank gives up with a message of its own, which other ranks receive.
void gives_up(Member& me) {
  if (me.rank == 0) {
    me.group->give_up("enough");
    return;
  }
  fl_signature s = signature(FL_BARRIER, 0);
  const Outcome outcome = outcome_of(me.group->run({s, nullptr, nullptr, -1, kForever, &kHere}));
  check(outcome.status == FL_RAISED && outcome.missing == std::vector<int>{0} && outcome.message == "enough",
        "the words of a me.rank that gives up are not heard: " + std::to_string(outcome.status));
}

#define MESSAGE(title, function, part, ...)                                                            \
  {.name = title "/2", .ranks = 2, .run = of_members<function, 2, 0, ##__VA_ARGS__>, .share = part,    \
   .is_searched = false, .vanishing = 1}
const Case messages[] = {
    MESSAGE("send_tiny", (one_way<kTiny, 2>), 4),
    MESSAGE("send_eager", (one_way<kEager, 3>), 4),
    MESSAGE("send_many", (one_way<kEager, 6>), 4),
    MESSAGE("send_sync", (one_way<kTiny, 2>), 4, true),
    MESSAGE("send_offered", (one_way<kOffered, 2>), 4),
    MESSAGE("ping_pong_tiny", ping_pong<kTiny>, 4),
    MESSAGE("ping_pong_offered", ping_pong<kOffered>, 2),
    MESSAGE("exchange_tiny", (exchange<kTiny, false>), 2),
    MESSAGE("exchange_offered", (exchange<kOffered, false>), 2),
    MESSAGE("exchange_started", (exchange<kEager, true>), 4),
    MESSAGE("send_started", started<kTiny>, 4),
    MESSAGE("offers_started", started<kOffered>, 4),
    MESSAGE("in_two_threads", in_two_threads, 8),
    MESSAGE("two_receivers_tiny", two_receivers<kTiny>, 8),
    MESSAGE("two_receivers_offered", two_receivers<kOffered>, 8),
    MESSAGE("two_receivers_at_once", (two_receivers<kOffered, true>), 8),
    MESSAGE("send_mismatch", mismatch<kTiny>, 2, true),
    MESSAGE("offer_mismatch", mismatch<kOffered>, 2, true),
    {.name = "wound_again/2", .ranks = 2, .prepare = prepare_wound, .run = of_members<wound_again>,
     .share = 8, .timers = 3, .is_searched = false},
    {.name = "claimed/2", .ranks = 2, .run = of_members<claimed>, .share = 2, .timers = 0, .is_searched = false},
    {.name = "freed_while_it_ticks/2", .ranks = 2, .run = of_members<freed_while_it_ticks>,
     .share = 2, .timers = 0, .is_searched = false},
    {.name = "closed_while_it_reads/2", .ranks = 2, .run = of_members<closed_while_it_reads>,
     .share = 4, .late = true, .is_searched = false, .vanishing = 4},
    {.name = "closed_with_a_message/2", .ranks = 2, .run = of_members<closed_with_a_message>,
     .share = 4, .late = true, .is_searched = false, .vanishing = 4},
    {.name = "any_source/3", .ranks = 3, .run = of_members<any_source, 3>, .share = 4, .is_searched = false},
    // In chunks if the other rank's memory cannot be read.
    {.name = "send_by_pieces/2", .ranks = 2, .run = of_members<one_way<kOffered, 2>>,
     .share = 4, .is_searched = false, .reads_fail = true, .vanishing = 2},
};

const Case groups[] = {
    {.name = "whole_life/2", .ranks = 2, .run = whole_life<2>,
     .share = 2, .late = true, .is_searched = false},
    {.name = "whole_life/3", .ranks = 3, .run = whole_life<3>,
     .share = 2, .late = true, .is_searched = false, .vanishing = 1},
    {.name = "leaves_after_a_message/2", .ranks = 2, .run = of_members<leaves_after_a_message>,
     .share = 2, .late = true, .is_searched = false},
    {.name = "closed_by_other/2", .ranks = 2, .run = of_members<closed_by_other>, .late = true, .is_searched = false},
    {.name = "closed_meanwhile/2", .ranks = 2, .run = of_members<closed_meanwhile>,
     .share = 2, .late = true, .is_searched = false},
    {.name = "gives_up/2", .ranks = 2, .run = of_members<gives_up>, .late = true, .is_searched = false},
    {.name = "part/3", .ranks = 3, .run = part,
     .share = 4, .late = true, .is_searched = false, .vanishing = 1},
};

const Table all_messages{messages}, all_groups{groups};

}  // namespace
