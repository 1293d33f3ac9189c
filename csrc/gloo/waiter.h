// Waits for Gloo's sends and receives, of operations that run beside each other, and what ends
// them early: a deadline, a signal handler, a lost peer, the end of the group.
#pragma once

#include <gloo/transport/unbound_buffer.h>

#include <thread>

#include "../common/operation.h"

namespace fl {

// How often a wait is looked after, and the longest that its end may come late.
constexpr std::chrono::milliseconds kTick{100};

class Connections;
class Receiver;
class Waiter;

// Looks after all waits of a group, and of the groups made of it, on a thread of its own. Gloo's own limit on
// a wait is no help: when it fires, it closes the connections before this rank could report why to the others.
class Watch {
 public:
  Watch();
  ~Watch();
  Watch(const Watch&) = delete;

  // Do `chore`, which may end waits, on this thread.
  void soon(std::function<void()> chore);

 private:
  friend class Connections;
  friend class Waiter;
  void add(Waiter& waiter);
  void remove(Waiter& waiter) noexcept;
  void work();
  void do_chores(std::unique_lock<std::mutex>& lock);
  void wake_those_who_should_know();

  mutable std::mutex mutex_;
  mutable std::condition_variable ended_;
  std::condition_variable changed_;
  std::vector<Waiter*> waiters_;
  std::vector<std::function<void()>> chores_;
  bool closing_ = false;
  bool ticking_ = false;
  std::thread thread_;  // last: it begins when all else is there
};

// What is known of the connections of a group, and whether it is waited on them at all.
class Connections {
 public:
  explicit Connections(Watch& watch) : watch(watch) {}
  virtual ~Connections() = default;

  virtual bool is_lost(int peer) = 0;
  // Whether nothing more comes of one that is lost: what it has sent is here.
  virtual bool has_said_all(int peer) = 0;
  // For a moment, read what comes from `peer` on the thread that is to wait for it in `buffer`.
  virtual void read(gloo::transport::UnboundBuffer& buffer, int peer) = 0;
  // What an error of a wait for `peer` means.
  virtual Failure explain(int peer, const std::string& what) = 0;

  // End every wait of the group, and those to come, with `reason`; the first one counts.
  void end(const Failure& reason) noexcept;
  // The reason ahead of that.
  void foretell(const Failure& reason) noexcept;
  // Why waits have been ended, if they have been, or are before `end`.
  std::optional<Failure> reason(Clock::time_point end = {}) const;
  // The same of messages, which the engine waits for.
  virtual void wake() noexcept = 0;
  // There is news: who waits for a rank that is lost is to know it at once.
  void wake_those_who_should_know() noexcept;

  Watch& watch;

 private:
  friend class Waiter;
  std::optional<Failure> reason_;  // guarded by the watch's mutex
};

// The waiter's own deadline has passed, not that of another operation.
struct TimedOut : Failure {
  explicit TimedOut(int peer) : Failure(FL_TIMEOUT, {peer}, "timed out") {}
};

// The waits of one operation, on one thread.
class Waiter {
 public:
  Waiter(Connections& connections, Clock::time_point deadline, InterruptCheck interrupt);
  ~Waiter();
  Waiter(const Waiter&) = delete;

  // Wait for one receive, or send, of `buffer` with `peer` to finish. Throws Failure.
  void received(gloo::transport::UnboundBuffer& buffer, int peer);
  void sent(gloo::transport::UnboundBuffer& buffer, int peer);

  Clock::time_point deadline() const { return deadline_; }
  // Lets signal handlers run: whether one says to give up.
  bool is_interrupted() const { return interrupt_ != nullptr && interrupt_() != 0; }

  // That of the operation that runs on this thread; null: none.
  static Waiter* current() { return current_; }

  // For a thread that waits for `peer` in another way, once in a tick: throws Failure where there
  // is no point in waiting on.
  void look_around(int peer);

 private:
  friend class Connections;
  friend class Watch;
  using Abort = void (gloo::transport::UnboundBuffer::*)();
  // To wait for what a buffer sends, or receives: how many waits would return at once.
  struct Way {
    bool (gloo::transport::UnboundBuffer::*wait)(int*, std::chrono::milliseconds);
    Abort abort;
    uint32_t (Receiver::*count)();
  };
  void wait(gloo::transport::UnboundBuffer& buffer, int peer, const Way& way);
  void enter(gloo::transport::UnboundBuffer& buffer, int peer, Abort abort);
  void leave() noexcept;
  void wake() noexcept;
  bool should_know(Clock::time_point now) const;

  static thread_local Waiter* current_;
  Waiter* const outer_ = current_;
  Connections& connections_;
  Watch& watch_ = connections_.watch;
  const Clock::time_point deadline_;
  const InterruptCheck interrupt_;
  bool doomed_ = false;  // the peer is lost, but its last words may still be read
  // What is waited for; guarded by the watch's mutex.
  gloo::transport::UnboundBuffer* buffer_ = nullptr;
  Abort abort_ = nullptr;
  int peer_ = -1;
};

}  // namespace fl
