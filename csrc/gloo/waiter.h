// Waits for Gloo's sends and receives, ended by deadlines, signal handlers, lost peers or a closed group.
#pragma once

#include <gloo/transport/unbound_buffer.h>

#include <thread>

#include "../common/operation.h"

namespace fl {

// Interval of the checks of waits, and the maximum delay until a wait ends that must end.
constexpr std::chrono::milliseconds kTick{100};

class Connections;
class Receiver;
class Waiter;

// A thread that checks all waits of a group and its subgroups. It replaces Gloo's own timeout, which closes
// the connections before this rank can report the reason.
class Watch {
 public:
  Watch();
  ~Watch();
  Watch(const Watch&) = delete;

  // Run `chore`, which may end waits, on the watch thread.
  void soon(std::function<void()> chore);

 private:
  friend class Connections;
  friend class Waiter;
  void add(Waiter& waiter);
  void remove(Waiter& waiter) noexcept;
  void work();
  void do_chores(std::unique_lock<std::mutex>& lock);
  void wake_concerned();

  mutable std::mutex mutex_;
  mutable std::condition_variable ended_;
  std::condition_variable changed_;
  std::vector<Waiter*> waiters_;
  std::vector<std::function<void()>> chores_;
  bool closing_ = false;
  bool ticking_ = false;
  std::thread thread_;  // last: started after the other members exist
};

// The state of a group's connections and the reason why its waits end.
class Connections {
 public:
  explicit Connections(Watch& watch) : watch(watch) {}
  virtual ~Connections() = default;

  virtual bool is_lost(int peer) = 0;
  // True if `peer` is lost and everything that it sent has arrived.
  virtual bool has_ended_sending(int peer) = 0;
  // Read arriving data of `peer` for a short time, on the thread that waits for `buffer`.
  virtual void read(gloo::transport::UnboundBuffer& buffer, int peer) = 0;
  // Return the failure for the error `what` of a wait for `peer`.
  virtual Failure explain(int peer, const std::string& what) = 0;

  // End all current and later waits of the group with `reason`. The first reason counts.
  void end(const Failure& reason) noexcept;
  // Set the reason, but do not end waits yet.
  void set_reason(const Failure& reason) noexcept;
  // Return the reason why waits end; wait for one until `end`.
  std::optional<Failure> reason(Clock::time_point end = {}) const;
  // Wake the engine's waits for messages.
  virtual void wake() noexcept = 0;
  // Wake waits that the latest news concerns, such as waits for a lost rank.
  void wake_concerned() noexcept;

  Watch& watch;

 private:
  friend class Waiter;
  std::optional<Failure> reason_;  // guarded by the watch's mutex
};

// Thrown if the deadline of this waiter itself has passed.
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
  // Run signal handlers; true if a handler asks to give up.
  bool is_interrupted() const { return interrupt_ != nullptr && interrupt_() != 0; }

  // Return the waiter of the operation that runs on this thread, or null.
  static Waiter* current() { return current_; }

  // Call it every tick of another kind of wait for `peer`. Throws Failure if that wait cannot succeed.
  void check(int peer);

 private:
  friend class Connections;
  friend class Watch;
  using Abort = void (gloo::transport::UnboundBuffer::*)();
  // Functions of a buffer for sends or for receives: wait, abort such waits, and count the finished ones.
  struct WaitFunctions {
    bool (gloo::transport::UnboundBuffer::*wait)(int*, std::chrono::milliseconds);
    Abort abort;
    uint32_t (Receiver::*count)();
  };
  void wait(gloo::transport::UnboundBuffer& buffer, int peer, const WaitFunctions& functions);
  void enter(gloo::transport::UnboundBuffer& buffer, int peer, Abort abort);
  void leave() noexcept;
  void wake() noexcept;
  bool is_concerned(Clock::time_point now) const;

  static thread_local Waiter* current_;
  Waiter* const outer_ = current_;
  Connections& connections_;
  Watch& watch_ = connections_.watch;
  const Clock::time_point deadline_;
  const InterruptCheck interrupt_;
  bool peer_is_lost_ = false;  // the peer is lost, but data that it sent may still be read
  // The current wait; guarded by the watch's mutex.
  gloo::transport::UnboundBuffer* buffer_ = nullptr;
  Abort abort_ = nullptr;
  int peer_ = -1;
};

}  // namespace fl
