// A futex that wakes threads of a rank by event bits.
#pragma once

#include "atomic.h"

namespace fl {

// A thread can wait for several events, in contrast to Counter: a wake with the bit of any event wakes it.
//
// The waiting thread reads the awaited value once more between begin_wait() and wait(). This read, the write
// of the value, and the accesses to `waiters_` have one order (seq_cst): either the waiting thread sees the
// value, or the waking thread sees the waiter. `wakes_` needs no order: a thread that sees the waiter runs
// after the waiter's load of `wakes_`, and the kernel compares `wakes_` again.
class Futex {
 public:
  // Call wake() after a change of the awaited value. The call costs almost nothing if no thread waits.
  void wake(uint32_t bits) {
    if (waiters_.load(std::memory_order_seq_cst) == 0) return;
    wakes_.fetch_add(1, std::memory_order_relaxed);
    futex_wake(&wakes_, bits, FutexScope::kProcesses);
  }

  // Begin a wait. If wake() is called after this, wait() returns without sleep. Call end_wait() at the end.
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
