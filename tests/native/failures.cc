#include "failures.h"

#include <signal.h>
#include <sys/mman.h>

#include "member.h"

namespace stress {
namespace {

size_t some_size(Random& random) {
  const size_t sizes[] = {1, 1000, 10000, 200000, 500000};
  return sizes[random.below(5)];
}

std::string told(const Outcome& outcome) {
  return "status " + std::to_string(outcome.status) + ": " + outcome.message;
}

}  // namespace

// Memory in test_leaving_after_a_small_part that cannot be read until a rank has left.
namespace {
char* withheld;
constexpr size_t kWithheldBytes = 1 << 20;
std::atomic<bool> has_left{false};

// Signal handler on the reading thread.
void give_when_left(int) {
  while (!has_left) usleep(1000);
  usleep(100000);  // several checks of the waiting ranks, which must continue
  mprotect(withheld, kWithheldBytes, PROT_READ | PROT_WRITE);
}
}  // namespace

// In a gather, a rank with little data is done at once and may leave while other ranks continue.
void test_leaving_after_a_small_part() {
  situation() = "rank 1 leaves while the root still gathers from rank 2";
  World world(3, 0, {});
  has_left = false;
  void* memory = mmap(nullptr, kWithheldBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  check(memory != MAP_FAILED, "mmap failed");
  withheld = static_cast<char*>(memory);
  struct sigaction give{}, before;
  give.sa_handler = give_when_left;
  sigaction(SIGSEGV, &give, &before);
  in_threads(3, [&](int rank) {
    auto group = world.join(rank);
    const size_t floats = rank == 2 ? kWithheldBytes / sizeof(float) : 1;
    const fl_signature s = signature_of(FL_GATHER, FL_FLOAT32, sizeof(float), floats);
    float small = 1;
    void* data = rank == 2 ? static_cast<void*>(withheld) : &small;
    const Outcome outcome = outcome_of(group->run({s, data, nullptr, -1, kForever}));
    check(outcome.status == FL_OK, "rank " + std::to_string(rank) + ": " + outcome.message);
    group.reset();
    if (rank == 1) has_left = true;
  });
  sigaction(SIGSEGV, &before, nullptr);
  munmap(memory, kWithheldBytes);
}

// Closing ends running and queued operations; handles outlive the group.
void test_closing_while_busy(Random& random) {
  const int ranks = 2 + static_cast<int>(random.below(4)), closer = static_cast<int>(random.below(ranks));
  Latch closed(1);
  in_world(ranks, some_size(random), rank_of(closer, ranks) + " closes while busy", [&](Member& me, int rank) {
    if (rank == closer) {
      std::vector<fl::Handle> started;
      for (int i = 0; i < 3; ++i) {
        started.push_back(me.group->start({me.signature, me.data.data(), nullptr, -1, kForever}));
      }
      me.group.reset();
      closed.count_down();
      for (const auto& operation : started) me.expect(outcome_of(operation), FL_CLOSED, {});
      return;
    }
    closed.wait();
    Outcome outcome = me.call();
    if (outcome.status == FL_OK) outcome = me.call();  // small data may have arrived in time
    me.expect(outcome, FL_PEER_LOST, {closer});
  });
}

// A signal handler closes the group inside a call of its own thread, while another thread waits for its turn.
void test_closing_in_a_handler(Random& random) {
  const int ranks = 2 + static_cast<int>(random.below(4)), closer = static_cast<int>(random.below(ranks));
  const size_t floats = some_size(random);
  Latch closed(1);
  in_world(ranks, floats, rank_of(closer, ranks) + " closes in a handler", [&](Member& me, int rank) {
    if (rank != closer) {
      closed.wait();
      Outcome outcome = me.call();
      if (outcome.status == FL_OK) outcome = me.call();  // small data may have arrived in time
      return me.expect(outcome, FL_PEER_LOST, {closer});
    }
    static thread_local fl::ShmGroup* handled;
    static thread_local Latch* others;
    handled = me.group.get();
    others = &closed;
    me.group->on_interrupt([] {
      if (handled == nullptr) return 0;  // another thread
      handled->close();
      others->count_down();
      handled = nullptr;
      return 0;
    });
    std::vector<float> other(floats);
    std::thread waits([&] {
      closed.wait();
      const auto ended = me.group->run({me.signature, other.data(), nullptr, -1, kForever});
      me.expect(outcome_of(ended), FL_CLOSED, {});
    });
    const Outcome outcome = me.call();
    waits.join();
    if (outcome.status != FL_OK) me.expect(outcome, FL_CLOSED, {});  // other ranks may have called already
  });
}

// One rank lacks memory for a gather: the other rank must not use its next call for this one.
void test_out_of_memory() {
  situation() = "the root of a gather has no memory";
  constexpr size_t kClaimed = size_t{1} << 47;  // more than a process can address
  World world(2, 0, {});
  in_threads(2, [&](int rank) {
    std::vector<char> data(4 << 20);
    const auto group = world.join(rank);
    const fl_signature s = signature_of(FL_GATHER, FL_INT8, 1, rank == 0 ? 1 : kClaimed);
    for (bool first : {true, false}) {
      const Outcome outcome = outcome_of(group->run({s, data.data(), nullptr, -1, kForever}));
      const fl_status wanted = !first ? FL_CLOSED : rank == 0 ? FL_FAILED : FL_PEER_LOST;
      check(outcome.status == wanted, "status " + std::to_string(outcome.status) + " of rank " +
                                          std::to_string(rank) + ": " + outcome.message);
    }
  });
}

// Broadcast from `root` with as many floats as the member has, each equal to `value` on the root.
namespace {
Outcome broadcast(Member& me, int root, float value, double seconds = kForever) {
  static const fl_site here{"here"};
  fl_signature s = me.signature;
  s.verb = FL_BROADCAST;
  s.root = root;
  if (me.rank == root) std::fill(me.data.begin(), me.data.end(), value);
  return outcome_of(me.group->run({s, me.data.data(), nullptr, -1, seconds, &here}));
}

}  // namespace

// Data that a root sent before it left arrives.
void test_going_ahead(Random& random) {
  const int ranks = 2 + static_cast<int>(random.below(4)), root = static_cast<int>(random.below(ranks));
  const int calls = 1 + static_cast<int>(random.below(fl::kMostAhead));
  const size_t floats = 1 + random.below(250);
  const std::string what = rank_of(root, ranks) + " leaves ahead, after " + std::to_string(calls) +
                           " broadcasts of " + std::to_string(floats) + " floats";
  in_world(ranks, floats, what, [&](Member& me, int rank) {
    for (int i = 1; i <= calls; ++i) {
      me.expect(broadcast(me, root, static_cast<float>(i)), FL_OK, {});
      check(me.data.back() == static_cast<float>(i), "what came is not what was given");
      if (rank != root && i % 2 == 0) usleep(1000);
    }
    if (rank == root) return;
    me.expect(me.call(), FL_PEER_LOST, {root});
    me.expect(me.call(), FL_CLOSED, {});
  });
}

// A rank may not be further ahead than other ranks can read; its wait then has a timeout.
void test_going_too_far_ahead() {
  Latch gave_up(1);
  in_world(2, 1, "the root of broadcasts is too far ahead of a rank that does not call", [&](Member& me, int rank) {
    if (rank == 0) {
      for (uint32_t i = 0; i < fl::kMostAhead; ++i) me.expect(broadcast(me, 0, 1), FL_OK, {});
      me.expect(broadcast(me, 0, 1, 0.2), FL_TIMEOUT, {1});
      gave_up.count_down();
    } else {
      gave_up.wait();
      for (uint32_t i = 0; i < fl::kMostAhead; ++i) me.expect(broadcast(me, 0, 1), FL_OK, {});
      me.expect(broadcast(me, 0, 1), FL_PEER_LOST, {0});
    }
  });
}

// Started messages end, including queued ones, and handles outlive the group.
void test_closing_with_messages(Random& random) {
  const int ranks = 2 + static_cast<int>(random.below(4)), peers = ranks - 1;
  const int started = 1 + static_cast<int>(random.below(20)), tags = 1 + started / 2;
  const size_t floats = some_size(random);
  const std::string what = "closing with " + std::to_string(started) + " messages of " + std::to_string(floats) +
                           " floats on their way, " + std::to_string(ranks) + " ranks";
  Latch posted(ranks), closed(1);
  in_world(ranks, floats, what, [&](Member& me, int rank) {
    std::vector<fl::Handle> running;
    if (rank == 0) {
      for (int i = 0; i < started; ++i) {
        const int verb = i % 3 == 0 ? FL_SEND : FL_RECV;
        running.push_back(me.start(verb, 1 + i % peers, i % tags));
      }
    }
    posted.count_down();
    posted.wait();
    if (rank != 0) {
      closed.wait();
      return me.expect(me.run(FL_RECV, 0, 1000), FL_PEER_LOST, {0});
    }
    me.group.reset();
    closed.count_down();
    for (const auto& operation : running) me.expect(outcome_of(operation), FL_CLOSED, {});
  });
}

// A failed collective ends the messages of its rank.
void test_breaking_with_messages(Random& random) {
  Latch ready(2), over(2);
  in_world(3, some_size(random), "a collective fails while messages wait", [&](Member& me, int rank) {
    if (rank == 2) return over.wait();  // and never calls
    const auto message = me.start(FL_RECV, 1 - rank, 5);
    ready.count_down();  // a rank that calls after the peer's timeout finds the group broken
    ready.wait();
    const Outcome outcome = me.call(0.3);
    check(outcome.status == FL_TIMEOUT || outcome.status == FL_PEER_LOST, told(outcome));
    const Outcome end = outcome_of(message);
    const bool ended = end.status == FL_CLOSED || end.status == FL_TIMEOUT || end.status == FL_PEER_LOST;
    check(ended, "a message goes on: " + told(end));
    me.expect(me.run(FL_SEND, 1 - rank, 5), FL_CLOSED, {});
    over.count_down();
  });
}

// A send of little data has ended when its receiver rejects it: the sender's next call raises, once.
void test_late_refusal(Random& random) {
  const bool is_collective = random.one_in(2);
  Latch refused(2);
  in_world(2, 2, "a small message is refused after its sender has returned", [&](Member& me, int rank) {
    if (rank == 0) me.expect(me.run(FL_SEND, 1, 5), FL_OK, {});
    if (rank == 1) {
      fl_signature other = me.message(FL_RECV, 5);
      other.count = other.shape[0] = 1;
      me.expect(outcome_of(me.group->run({other, me.data.data(), nullptr, 0, kForever})), FL_MISMATCH, {});
    }
    refused.count_down();
    refused.wait();
    if (rank == 0) {
      // Any call handles arrived records; here a receive from the other rank.
      me.expect(me.run(FL_RECV, 1, 6), FL_OK, {});
      me.expect(is_collective ? me.call() : me.run(FL_SEND, 1, 7), FL_MISMATCH, {});
    } else {
      me.expect(me.run(FL_SEND, 0, 6), FL_OK, {});
    }
    me.expect(me.call(), FL_OK, {});
  });
}

}  // namespace stress
