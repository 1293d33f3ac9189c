// A counter in shared memory. One process raises it, and other processes wait for it.
#pragma once

#include "../common/atomic.h"
#include "../common/patience.h"

namespace fl {

class Counter {
 public:
  // True if the counter has reached `target`. Correct also after the counter has wrapped around.
  bool reached(uint32_t target) const {
    return static_cast<int32_t>(value_.load(std::memory_order_acquire) - target) >= 0;
  }

  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  // Set the value and publish all earlier writes. Only the owner calls it.
  void raise(uint32_t value) {
    // Because of seq_cst, either a thread in sleep() sees the new value, or this thread sees that thread.
    value_.exchange(value, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) wake();
  }

  // Set the value without waking threads: for counters that are only polled, or before another raise().
  void set(uint32_t value) { value_.store(value, std::memory_order_release); }

  void wake() { futex_wake(&value_, kAllBits, FutexScope::kProcesses); }

  // Return true if the counter reaches `target`, or false after about `milliseconds`.
  bool wait(uint32_t target, Patience patience, long milliseconds) {
    return poll(target, patience) || sleep(target, milliseconds);
  }

  // The two steps of wait().
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
    // No order is needed here: after a full barrier, the kernel reads the value again.
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
