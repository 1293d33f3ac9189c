// A counter in shared memory that one process raises and other processes wait for.
#pragma once

#include "../common/atomic.h"
#include "../common/patience.h"

namespace fl {

// Eight bytes. The containing struct selects the cache line.
class Counter {
 public:
  // True if the counter has reached `target`. The sign of the difference decides, because the counter wraps.
  bool reached(uint32_t target) const {
    return static_cast<int32_t>(value_.load(std::memory_order_acquire) - target) >= 0;
  }

  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  // Set the value and publish all earlier writes. Only the owner calls it.
  void raise(uint32_t value) {
    // Single order with sleep(): a sleeper sees the new value, or this thread sees the sleeper.
    value_.exchange(value, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) wake();
  }

  // Like raise() without a wake: for counters that other ranks only poll, or that a later raise() publishes.
  void set(uint32_t value) { value_.store(value, std::memory_order_release); }

  void wake() {
    futex_wake(&value_, kAllBits, FutexScope::kProcesses);
  }

  // Wait until the counter reaches `target` (true) or about `milliseconds` have passed (false).
  bool wait(uint32_t target, Patience patience, long milliseconds) {
    return poll(target, patience) || sleep(target, milliseconds);
  }

  // poll() and sleep() are the two steps of wait().
  bool poll(uint32_t target, Patience patience) {
    for (int i = 0; i < patience.spins; ++i) {
      if (reached(target)) return true;
      pause_after(i);
    }
    for (int i = 0; i < patience.yields; ++i) {
      if (reached(target)) return true;
      yield_processor();
    }
    return false;
  }
  bool sleep(uint32_t target, long milliseconds) {
    // This access needs no order: the kernel reads the value again after a full barrier.
    sleepers_.fetch_add(1, std::memory_order_relaxed);
    const uint32_t observed = value_.load(std::memory_order_relaxed);
    if (static_cast<int32_t>(observed - target) < 0) {
      futex_wait(&value_, observed, int64_t{milliseconds} * 1000000, kAllBits, FutexScope::kProcesses);
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return reached(target);
  }

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

}  // namespace fl
