#include "delivery.h"

#include <sched.h>

namespace fl {
namespace {

class Delivery {
 public:
  Delivery(Mail& mail, Peers& peers, const std::vector<Message*>& messages, const Waiting& waiting)
      : bell_(mail.segment.block(mail.rank).bell),
        peers_(peers),
        messages_(messages),
        waiting_(waiting) {}

  void run() {
    while (!step_patiently()) sleep();
  }

 private:
  // Without going to sleep; whether all have ended.
  bool step_patiently() {
    const auto [spins, yields] = waiting_.patience;
    for (int idle = 0; idle <= spins + yields; ++idle) {
      if (step()) idle = -1;
      if (left_ == 0) return true;
      idle < spins ? pause_briefly() : static_cast<void>(sched_yield());
    }
    return false;
  }

  // Whether any went on.
  bool step() {
    bool moved = false;
    left_ = 0;
    for (Message* message : messages_) {
      if (message->may_step()) moved = message->step() || moved;
      left_ += message->has_ended() ? 0 : 1;
    }
    if (moved) since_ = {};
    return moved;
  }

  void sleep() {
    if (since_ == Clock::time_point()) since_ = Clock::now();
    uint32_t bits = 0;
    for (Message* message : messages_) {
      if (!message->may_step()) continue;
      message->settle();
      bits |= message->bits();
    }
    const uint32_t rings = bell_.listen();
    const bool moved = step();
    if (!moved) bell_.sleep(rings, bits, kSliceMilliseconds);
    bell_.leave();
    if (!moved && !step()) look_around();
  }

  // A peer that has gone may have done its part just before: then all is well here.
  void look_around() {
    for (Message* message : messages_) {
      if (!message->may_step()) continue;
      Watch watch(peers_, Concern{message->peer(), 0}, waiting_.seconds, waiting_.interrupt);
      const auto lost = watch.loss();
      if (lost && !message->step()) throw *lost;
      check(watch, *message);
    }
  }

  void check(Watch& watch, Message& message) {
    try {
      watch.check(since_, message.peer());
    } catch (const Failure& failure) {
      if (failure.status != FL_TIMEOUT) throw;
      throw Failure(FL_TIMEOUT, failure.missing, message.what_keeps_it());
    }
  }

  Bell& bell_;
  Peers& peers_;
  const std::vector<Message*>& messages_;
  const Waiting& waiting_;
  size_t left_ = 1;
  Clock::time_point since_{};  // when nothing more went on; of all messages together
};

// How long a caller that does not want to wait tries: much less than a thread takes to wake up where
// nothing moves, about as long where something does.
constexpr auto kIdle = std::chrono::microseconds(20), kMoment = std::chrono::microseconds(100);

}  // namespace

void deliver_briefly(const Peers& peers, const std::vector<Message*>& messages) {
  const auto began = Clock::now();
  const auto idle = peers.may_spin() ? kIdle : kMoment;  // or others have to get this processor first
  auto moved_at = began;
  for (;;) {
    bool moved = false, goes_on = false;
    for (Message* message : messages) {
      if (message->may_step()) moved = message->step() || moved;
      goes_on = goes_on || !message->has_ended();
    }
    const auto now = Clock::now();
    if (moved) moved_at = now;
    if (!goes_on || now - began > kMoment || now - moved_at > idle) return;
    if (moved) continue;
    peers.may_spin() ? pause_briefly() : static_cast<void>(sched_yield());
  }
}

void deliver(Mail& mail, Peers& peers, const std::vector<Message*>& messages,
             const Waiting& waiting) {
  Delivery(mail, peers, messages, waiting).run();
}

}  // namespace fl
