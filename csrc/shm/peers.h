// The other ranks of the host: waiting for them, and noticing when there is no point.
#pragma once

#include "../common/operation.h"
#include "segment.h"

namespace fl {

inline Failure interrupted() { return {FL_CLOSED, {}, kInterrupted}; }

// How long a sleep lasts before a rank looks around: for farewells, deaths, signals, the deadline.
constexpr long kSliceMilliseconds = 20;

// Whom an operation needs: the rank `only`, whatever becomes of the others, or where that is -1 all
// that have not done their part of the collective number `call`.
struct Concern {
  int only = -1;
  uint32_t call = 0;
};

// A process of this host, whose end is known. All groups that a rank is in share one of each peer.
class Process {
 public:
  static std::shared_ptr<Process> find(int32_t pid);

  // `fd`: of the process, or in its place that none can be had, that it had ended before.
  explicit Process(int fd) : fd_(fd) {}
  ~Process() { close_file(); }
  Process(const Process&) = delete;
  bool has_ended() const;
  void close_file() noexcept;

 private:
  int fd_;
};

// Of all operations; any thread may call.
class Peers : public Transport {
 public:
  Peers(const Segment& segment, int rank, int size);
  ~Peers() override;
  Peers(const Peers&) = delete;

  // Why an operation waits in vain: somebody it needs has gone, or this rank itself.
  std::optional<Failure> loss(const Concern& concern);
  // The same whether or not an operation needs anybody: who has gone, other than in order and alive.
  std::optional<Failure> lost();
  // Whether operations of this rank must end: it has closed the group, or it broke.
  bool has_ended() const { return stopped_.load(std::memory_order_relaxed) || is_broken(); }
  Failure why_ended() const {
    return is_broken() ? why_broken() : Failure(FL_CLOSED, {}, kWasClosed);
  }
  std::optional<Failure> loss_of(int rank) override { return loss(Concern{rank}); }
  bool has_left(int r) override {
    const int64_t left_at = segment_.block(r).left_at.load(std::memory_order_relaxed);
    return left_at != 0 && coarse_now() - left_at > std::chrono::nanoseconds(kLastMessages).count();
  }
  bool has_given_up(int r) override { return segment_.block(r).farewell.given.value() != 0; }
  // Let the others know that this rank begins no more messages.
  void leave() { segment_.block(rank_).left_at.store(coarse_now(), std::memory_order_relaxed); }
  // The ranks that have not called yet.
  std::vector<int> not_called(const Concern& concern) const;

  // The less, the more waits have been in vain lately: with what they wait for elsewhere, as on other
  // hosts, or for a rank that needs this one's processor. Every so many waits all of it is tried: two ranks
  // that wake each other up, which takes longer than what is left of it, would do so for ever.
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
  // Whether every rank has a processor of its own to wait on.
  bool may_spin() const { return patience_.spins > 0; }

  void enforce_deadline() override {}
  void stop() override { stopped_.store(true, std::memory_order_relaxed); }
  // In a forked child, or where nothing uses them any more.
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
  const uint64_t space_;  // of process numbers
  std::atomic<int> vain_{0};
  std::atomic<unsigned> waits_{0};  // while there were any in vain
  std::atomic<bool> stopped_{false};  // says nothing else: whoever sees it late looks again
  std::atomic<bool> has_farewell_{false};  // or is about to have
  std::mutex mutex_;         // of what follows
  std::vector<std::shared_ptr<Process>> processes_;  // by rank; null: not asked for yet
};

// The waits of one operation, on one thread.
class Watch {
 public:
  // Each wait may take `seconds`. On the caller's own thread it can be interrupted.
  Watch(Peers& peers, Concern concern, double seconds, InterruptCheck interrupt)
      : peers_(&peers), concern_(concern), seconds_(seconds), interrupt_(interrupt) {}

  // The same, each wait for so many seconds at most.
  Watch at_most(double seconds) const {
    return {*peers_, concern_, std::min(seconds, seconds_), interrupt_};
  }

  // The same, in the collective number `call`.
  Watch in_call(uint32_t call) const { return {*peers_, Concern{-1, call}, seconds_, interrupt_}; }

  // Wait until a counter of rank `peer` has reached `target`; throws Failure.
  void wait(Counter& counter, uint32_t target, int peer) {
    if (!counter.reached(target)) wait_long(counter, target, peer);
  }

  // The same, and do what others ask for meanwhile: `serve` returns whether they did. The first request
  // may wait for a slice, those that follow do not.
  template <typename Serve>
  void wait_and(Counter& counter, uint32_t target, int peer, Serve serve) {
    long slice = kSliceMilliseconds;
    auto since = Clock::now();
    while (!counter.wait(target, peers_->patience(), slice)) {
      if (serve()) {
        slice = 1;
        since = Clock::now();
      } else {
        look_around(counter, target, since, peer);
      }
    }
  }

  // For whoever sleeps by other means: why a wait that began at `since` should end. A result that has come
  // meanwhile counts more than `loss`, so that it is asked for first.
  std::optional<Failure> loss() { return peers_->loss(concern_); }
  void check(Clock::time_point since, int peer);

 private:
  void wait_long(Counter& counter, uint32_t target, int peer);
  void look_around(const Counter& counter, uint32_t target, Clock::time_point since, int peer);

  Peers* peers_;
  Concern concern_;
  double seconds_;
  InterruptCheck interrupt_;
};

}  // namespace fl
