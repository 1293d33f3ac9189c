// Wakes the threads of a rank that sleep until something has changed, whatever it is.
#pragma once

#include "atomic.h"

namespace fl {

// A thread may wait for several things at once, which a Counter does not allow: each sets bits of
// its choice, and is woken by whoever wakes one of them.
//
// The value that is waited for is written, and read again between begin_wait() and wait(), in one order with
// `waiters_` (seq_cst): either the waiter sees it, or the one who wakes sees the waiter. `wakes_` needs no
// order: who sees the waiter is behind its load of it, and adds before the kernel's full barrier.
class Futex {
 public:
  // After a change. Costs next to nothing while nobody waits.
  void wake(uint32_t bits) {
    if (waiters_.load(std::memory_order_seq_cst) == 0) return;
    wakes_.fetch_add(1, std::memory_order_relaxed);
    futex_wake(&wakes_, bits, Among::kProcesses);
  }

  // From here on nothing is missed: wait(begin_wait(), ...) returns at once if wake() was called
  // between the two. end_wait() must follow.
  uint32_t begin_wait() {
    const uint32_t wakes = wakes_.load(std::memory_order_relaxed);
    waiters_.fetch_add(1, std::memory_order_seq_cst);
    return wakes;
  }

  void end_wait() { waiters_.fetch_sub(1, std::memory_order_relaxed); }

  void wait(uint32_t wakes, uint32_t bits, long milliseconds) {
    futex_wait(&wakes_, wakes, int64_t{milliseconds} * 1000000, bits, Among::kProcesses);
  }

 private:
  std::atomic<uint32_t> wakes_{0};
  std::atomic<uint32_t> waiters_{0};
};

}  // namespace fl
