// Waits for sends and receives of Gloo. Deadlines, signal handlers, lost peers and close() can end them.
#pragma once

#include <gloo/transport/unbound_buffer.h>

#include <thread>

#include "../common/operation.h"

namespace fl {

// Time between checks of all waits. A wait that must end ends within this time.
constexpr std::chrono::milliseconds kTick{100};

class Connections;
class Receiver;
class Waiter;

// A thread that checks all waits of a group and its subgroups. Gloo's own timeout is not used, because it
// closes connections before this rank can report the reason.
class Watch {
 public:
  Watch();
  ~Watch();
  Watch(const Watch&) = delete;

  // Run `chore` on the watch thread. It may end waits.
  void soon(std::function<void()> chore);

 private:
  friend class Connections;
  friend class Waiter;
  void work();
  void do_chores(std::unique_lock<std::mutex>& lock);
  void wake_concerned();

  mutable std::mutex mutex_;
  mutable std::condition_variable ended_;
  std::condition_variable changed_;
  std::vector<Waiter*> waiters_;  // that wait now
  std::vector<std::function<void()>> chores_;
  bool closing_ = false;
  bool ticking_ = false;
  std::thread thread_;  // declared last, because it uses the other members
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
  // Return the failure to raise if a wait for `peer` fails with the error `what`.
  virtual Failure explain(int peer, const std::string& what) = 0;

  // End all current and later waits of the group with `reason`. Later calls do not change the reason.
  void end(const Failure& reason) noexcept;
  // Set the reason without ending waits.
  void set_reason(const Failure& reason) noexcept;
  // Return the reason why waits end. If there is none yet, wait for it until `end`.
  std::optional<Failure> reason(Clock::time_point end = {}) const;
  // Wake the waits for messages.
  virtual void wake() noexcept = 0;
  // Wake all waits that must be checked now, for example waits for a lost rank.
  void wake_concerned() noexcept;

  Watch& watch;

 private:
  friend class Waiter;
  std::optional<Failure> reason_;  // guarded by the watch's mutex
};

// Thrown if the deadline of a wait on this rank has passed.
struct TimedOut : Failure {
  explicit TimedOut(int peer) : Failure(FL_TIMEOUT, {peer}, "timed out") {}
};

// The waits of one operation, on one thread.
class Waiter {
 public:
  Waiter(Connections& connections, Clock::time_point deadline, InterruptCheck interrupt);
  ~Waiter();
  Waiter(const Waiter&) = delete;

  // Wait until a receive into `buffer`, or a send from it, has finished with `peer`. Throws Failure.
  void received(gloo::transport::UnboundBuffer& buffer, int peer);
  void sent(gloo::transport::UnboundBuffer& buffer, int peer);

  Clock::time_point deadline() const { return deadline_; }
  // Run signal handlers. Return true if a handler has raised an error.
  bool is_interrupted() const { return interrupt_ != nullptr && interrupt_() != 0; }

  // Return the waiter of the operation that runs on this thread, or null.
  static Waiter* current() { return current_; }

  // For waits that do not use Gloo: call it every kTick. Throws Failure if the wait for `peer` must end.
  void check(int peer);

 private:
  friend class Connections;
  friend class Watch;
  using Abort = void (gloo::transport::UnboundBuffer::*)();
  // Functions of a buffer for sends or for receives: wait, abort the wait, count the finished transfers.
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
  bool peer_is_lost_ = false;  // the last check found the peer lost
  // Arguments of the current wait. The watch's mutex guards them.
  gloo::transport::UnboundBuffer* buffer_ = nullptr;
  Abort abort_ = nullptr;
  int peer_ = -1;
};

}  // namespace fl
