// A futex that wakes threads of a rank by event bits.
#pragma once

#include "atomic.h"

namespace fl {

// Unlike with a Counter, a thread may wait for several events: a wake with any of their bits wakes it.
//
// The awaited value is written, and read again between begin_wait() and wait(), in a single order with
// `waiters_` (seq_cst): either the waiter sees the value or the waking thread sees the waiter. `wakes_` needs
// no order: a thread that sees the waiter runs after its load of `wakes_` and before the kernel's barrier.
class Futex {
 public:
  // Call it after a change of the awaited value. If no thread waits, a call costs almost nothing.
  void wake(uint32_t bits) {
    if (waiters_.load(std::memory_order_seq_cst) == 0) return;
    wakes_.fetch_add(1, std::memory_order_relaxed);
    futex_wake(&wakes_, bits, FutexScope::kProcesses);
  }

  // Start a wait. If wake() is called from now on, wait() returns at once. Call end_wait() afterwards.
  uint32_t begin_wait() {
    const uint32_t wakes = wakes_.load(std::memory_order_relaxed);
    waiters_.fetch_add(1, std::memory_order_seq_cst);
    return wakes;
  }

  void end_wait() { waiters_.fetch_sub(1, std::memory_order_relaxed); }

  void wait(uint32_t wakes, uint32_t bits, long milliseconds) {
    futex_wait(&wakes_, wakes, int64_t{milliseconds} * 1000000, bits, FutexScope::kProcesses);
  }

 private:
  std::atomic<uint32_t> wakes_{0};
  std::atomic<uint32_t> waiters_{0};
};

}  // namespace fl
