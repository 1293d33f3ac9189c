// Messages whose other end or group ends.
#include <signal.h>

#include "failures.h"
#include "member.h"

namespace stress {
namespace {

// Sizes: one piece, partly sent with the offer, and large.
size_t some_size(Random& random) {
  const size_t sizes[] = {0, 1, 5000, 10000, 300000};
  return sizes[random.below(5)];
}

std::string told(const Outcome& outcome) {
  return "status " + std::to_string(outcome.status) + ": " + outcome.message;
}

}  // namespace

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

void test_killed_messenger(Random& random) {
  const int ranks = 2 + static_cast<int>(random.below(4)), victim = static_cast<int>(random.below(ranks));
  const int before = static_cast<int>(random.below(20));
  const size_t floats = some_size(random);
  const std::string what = rank_of(victim, ranks) + " is killed after " + std::to_string(before) + " messages of " +
                           std::to_string(floats) + " floats";
  const auto run = [&](Member& me, int rank) {
    const int next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks;
    for (int i = 0; i < before; ++i) {
      const auto sent = me.start(FL_SEND, next, i);
      std::vector<float> room(floats);
      me.expect(outcome_of(me.group->run({me.message(FL_RECV, i), room.data(), nullptr, last, kForever})), FL_OK, {});
      me.expect(outcome_of(sent), FL_OK, {});
    }
    if (rank == victim) raise(SIGKILL);
    std::vector<float> room(floats);
    const auto sent = me.start(FL_SEND, victim, -1);
    const Outcome received = outcome_of(
        me.group->run({me.message(FL_RECV, -1), room.data(), nullptr, victim, kForever}));
    // The first operation that detects it breaks the group.
    const bool receive_is_first = received.status != FL_CLOSED;
    me.expect(receive_is_first ? received : outcome_of(sent), FL_PEER_LOST, {victim});
    const Outcome end = outcome_of(sent);
    check(end.status == FL_PEER_LOST || end.status == FL_CLOSED, told(end));
  };
  in_world(ranks, floats, what, run, victim);
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

// Thousands of messages, with separate tags or one tag, that end well, with the group, or with the peer.
void test_many_open(Random& random) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr int kMany = 2000;
#else
  constexpr int kMany = 10000;
#endif
  const bool in_one_tag = random.one_in(2), sends_first = random.one_in(2);
  const int ending = static_cast<int>(random.below(kOneAddress ? 2 : 3));
  const bool is_large = random.one_in(2);
  const size_t floats = is_large ? 5000 : 1;
  const int many = is_large ? kMany / 10 : kMany;
  const std::string what = std::to_string(many) + " open messages of " + std::to_string(floats) + " floats" +
                           (in_one_tag ? " in one tag" : "") + ", ending " + std::to_string(ending);
  const auto begin = [&](Member& me, int verb) {
    me.data.resize(many * floats);
    std::vector<fl::Handle> open;
    for (int i = 0; i < many; ++i) {
      const fl_signature s = me.message(verb, in_one_tag ? 0 : i);
      open.push_back(me.group->start({s, &me.data[i * floats], nullptr, 1 - me.rank, kForever}));
    }
    return open;
  };
  Latch posted(2), closed(1);
  const auto run = [&](Member& me, int rank) {
    if (ending == 2) {
      const auto open = begin(me, FL_RECV);
      me.expect(me.call(), FL_OK, {});
      if (rank == 1) raise(SIGKILL);
      for (const auto& handle : open) me.expect(outcome_of(handle), FL_PEER_LOST, {1});
      return;
    }
    const bool sends = (rank == 0) == sends_first;
    if (ending == 1) {
      const auto open = begin(me, FL_RECV);
      posted.count_down();
      posted.wait();
      if (rank == 1) closed.wait();
      if (rank == 0) me.group.reset();
      closed.count_down();
      for (const auto& handle : open) {
        rank == 0 ? me.expect(outcome_of(handle), FL_CLOSED, {})
                  : me.expect(outcome_of(handle), FL_PEER_LOST, {0});
      }
      return;
    }
    const auto open = begin(me, sends ? FL_SEND : FL_RECV);
    for (const auto& handle : open) me.expect(outcome_of(handle), FL_OK, {});
  };
  in_world(2, floats, what, run, ending == 2 ? 1 : -1);
}

}  // namespace stress
