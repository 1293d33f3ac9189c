#include "delivery.h"

#include <sched.h>

namespace fl {
namespace {

struct Step {
  bool moved = false;    // any of them
  bool goes_on = false;  // some have not ended
};

Step step_all(const std::vector<Message*>& messages) {
  Step step;
  for (Message* message : messages) {
    if (message->may_step()) step.moved = message->step() || step.moved;
    step.goes_on = step.goes_on || !message->has_ended();
  }
  return step;
}

class Delivery {
 public:
  Delivery(Mail& mail, Peers& peers, const std::vector<Message*>& messages, const Waiting& waiting)
      : futex_(mail.segment.block(mail.rank).futex),
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
      if (!goes_on_) return true;
      idle < spins ? pause_after(idle) : static_cast<void>(sched_yield());
    }
    return false;
  }

  // Whether any went on.
  bool step() {
    const auto [moved, goes_on] = step_all(messages_);
    goes_on_ = goes_on;
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
    const uint32_t wakes = futex_.begin_wait();
    const bool moved = step();
    if (!moved) futex_.wait(wakes, bits, kSliceMilliseconds);
    futex_.end_wait();
    if (!moved && !step()) look_around();
  }

  // A peer that has gone may have done its part just before: then all is well here.
  void look_around() {
    for (Message* message : messages_) {
      if (!message->may_step()) continue;
      Watch watch(peers_, Concern{message->peer(), 0}, waiting_.seconds, waiting_.interrupt);
      const auto lost = watch.loss();
      if (lost && !message->step()) throw *lost;
      if (!message->is_matched()) waiting_.look_around(peers_, {message->peer()}, since_);
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

  Futex& futex_;
  Peers& peers_;
  const std::vector<Message*>& messages_;
  const Waiting& waiting_;
  bool goes_on_ = true;
  Clock::time_point since_{};  // when nothing more went on; of all messages together
};

// How long a caller that does not want to wait tries: much less than a thread takes to wake up where
// nothing moves, about as long where something does.
constexpr auto kIdle = std::chrono::microseconds(20), kMoment = std::chrono::microseconds(100);

}  // namespace

bool deliver_within(const Peers& peers, const std::vector<Message*>& messages, int spins) {
  for (int idle = peers.may_spin() ? 0 : spins; idle <= spins; ++idle) {
    const auto [moved, goes_on] = step_all(messages);
    if (!goes_on) return true;
    if (moved && peers.may_spin()) idle = -1;
    pause_after(idle);
  }
  return false;
}

void deliver_briefly(const Peers& peers, const std::vector<Message*>& messages) {
  const auto began = Clock::now();
  const auto idle = peers.may_spin() ? kIdle : kMoment;  // or others have to get this processor first
  auto moved_at = began;
  for (;;) {
    const auto [moved, goes_on] = step_all(messages);
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
