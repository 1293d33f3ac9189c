// Waits for other ranks of the host, and detection of ranks that have left, ended the group or died.
#pragma once

#include "../common/operation.h"
#include "segment.h"

namespace fl {

inline Failure interrupted() { return {FL_CLOSED, {}, kInterrupted}; }

// Maximum milliseconds of sleep between checks for ended ranks, signals and the deadline.
constexpr long kSliceMilliseconds = 20;

// The ranks that an operation needs: rank `only`, or if it is -1, all ranks that have not made call `call`.
struct Concern {
  int only = -1;
  uint32_t call = 0;
};

// A process of this host. All groups of this process use the same object for it.
class Process {
 public:
  static std::shared_ptr<Process> find(int32_t pid);

  // `fd` is a pidfd, kNoProcess or kEndedProcess.
  explicit Process(int fd) : fd_(fd) {}
  ~Process() { if (fd_ >= 0) close(fd_); }
  Process(const Process&) = delete;
  bool has_ended() const { return process_has_ended(fd_); }

 private:
  const int fd_;
};

// Reports lost ranks to all operations of a group. Thread-safe.
class Peers : public Transport {
 public:
  Peers(const Segment& segment, int rank, int size);
  ~Peers() override;
  Peers(const Peers&) = delete;

  // Return why an operation cannot finish: a needed rank has ended, or this rank has closed the group.
  std::optional<Failure> loss(const Concern& concern);
  // Return the failure of any rank that has ended, except ranks that left in order.
  std::optional<Failure> lost();
  // True if operations of this rank must end, because this rank closed the group or the group is broken.
  bool has_ended() const { return stopped_.load(std::memory_order_relaxed) || is_broken(); }
  Failure why_ended() const {
    return is_broken() ? why_broken() : Failure(FL_CLOSED, {}, kWasClosed);
  }
  std::optional<Failure> loss_of(int rank) override { return loss(Concern{rank}); }
  bool has_left(int r) override {
    const int64_t left_at = segment_.block(r).left_at.load(std::memory_order_relaxed);
    return left_at != 0 && coarse_now() - left_at > std::chrono::nanoseconds(kLastMessages).count();
  }
  bool has_given_up(int r) override { return segment_.block(r).farewell.is_set.value() != 0; }
  // Announce that this rank will start no more sends and receives.
  void leave() { segment_.block(rank_).left_at.store(coarse_now(), std::memory_order_relaxed); }
  // Return the ranks that have not made collective concern.call.
  std::vector<int> not_called(const Concern& concern) const;

  // Duration of polling before a sleep. Polling without success reduces it, because the awaited rank may be
  // on another host or need this processor. Every kTryEvery-th wait polls for the full time: if both ranks
  // sleep, their wake-ups may take longer than the reduced time.
  Patience patience() const override {
    const bool tries = waits_.load(std::memory_order_relaxed) % kTryEvery == 0;
    return {patience_.spins >> (tries ? 0 : vain_.load(std::memory_order_relaxed)), patience_.yields};
  }
  void waited(bool in_vain) override {
    const int before = vain_.load(std::memory_order_relaxed);
    if (!in_vain && before == 0) return;
    const bool tried = waits_.fetch_add(1, std::memory_order_relaxed) % kTryEvery == 0;
    const int after = in_vain ? std::min(before + 2, kMostVain) : tried ? 0 : std::max(before - 1, 0);
    if (after != before) vain_.store(after, std::memory_order_relaxed);
  }
  // True if every rank has its own processor.
  bool may_spin() const { return patience_.spins > 0; }

  void stop() override { stopped_.store(true, std::memory_order_relaxed); }
  // Close all pidfds: in a forked child, or after the last use.
  void close_files() noexcept;
  Failure explain(const std::string& what) override { return {FL_FAILED, {}, what}; }
  void give_up(const Failure& failure) noexcept override;

 private:
  std::optional<Failure> farewell(const Concern& concern) const;
  std::vector<int> dead(const Concern& concern);
  bool matters(int r, const Concern& concern) const;
  bool left_in_order(int r) const;
  bool is_dead(int r);

  const Segment& segment_;
  const int rank_, size_;
  static constexpr int kMostVain = 8;
  static constexpr unsigned kTryEvery = 8;
  const Patience patience_;
  const uint64_t space_;  // PID namespace
  std::atomic<int> vain_{0};
  std::atomic<unsigned> waits_{0};  // number of waits while vain_ is positive
  std::atomic<bool> stopped_{false};
  std::atomic<bool> has_farewell_{false};            // give_up() was called
  std::mutex mutex_;                                 // guards the members below
  std::vector<std::shared_ptr<Process>> processes_;  // index: rank; null if not needed yet
};

// The waits of one operation, on one thread.
class Watch {
 public:
  // Each wait has a timeout of `seconds`. `interrupt` checks for signals; it may be null.
  Watch(Peers& peers, Concern concern, double seconds, InterruptCheck interrupt)
      : peers_(&peers), concern_(concern), seconds_(seconds), interrupt_(interrupt) {}

  // Return a copy with a timeout of at most `seconds`.
  Watch at_most(double seconds) const {
    return {*peers_, concern_, std::min(seconds, seconds_), interrupt_};
  }

  // Return a copy for collective number `call`.
  Watch in_call(uint32_t call) const { return {*peers_, Concern{-1, call}, seconds_, interrupt_}; }

  // Wait until `counter` of rank `peer` reaches `target`. Throws Failure.
  void wait(Counter& counter, uint32_t target, int peer) {
    if (!counter.reached(target)) wait_long(counter, target, peer);
  }

  // Like wait(), but call `serve` every kSliceMilliseconds, and every millisecond after it has handled a
  // request of another rank. `serve` returns true if there was a request.
  template <typename Serve>
  void wait_and(Counter& counter, uint32_t target, int peer, Serve serve) {
    long slice = kSliceMilliseconds;
    auto since = Clock::now();
    while (!counter.wait(target, peers_->patience(), slice)) {
      if (serve()) {
        slice = 1;
        since = Clock::now();
      } else {
        check_loss(counter, target, since, peer);
      }
    }
  }

  // For other kinds of waits: the reason to end the wait, if any. First check whether the result has arrived.
  std::optional<Failure> loss() { return peers_->loss(concern_); }
  void check(Clock::time_point since, int peer);

 private:
  void wait_long(Counter& counter, uint32_t target, int peer);
  void check_loss(const Counter& counter, uint32_t target, Clock::time_point since, int peer);

  Peers* peers_;
  Concern concern_;
  double seconds_;
  InterruptCheck interrupt_;
};

}  // namespace fl
