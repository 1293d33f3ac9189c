// Wakes the threads of a rank that sleep until something has changed, whatever it is.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace fl {

// A thread may wait for several things at once, which a Counter does not allow: each sets bits of
// its choice, and is woken by whoever rings one of them.
//
// What is waited for is written, and read again between listen() and sleep(), in one order with
// what happens here (seq_cst): either the sleeper sees it, or the one who rings sees the listener.
class Bell {
 public:
  // After a change. Costs next to nothing while nobody listens.
  void ring(uint32_t bits) {
    if (listeners_.load(std::memory_order_seq_cst) == 0) return;
    rings_.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, word(), FUTEX_WAKE_BITSET, INT_MAX, nullptr, nullptr, bits);
  }

  // From here on nothing is missed: sleep(listen(), ...) returns at once if the bell has rung
  // between the two. leave() must follow.
  uint32_t listen() {
    listeners_.fetch_add(1, std::memory_order_seq_cst);
    return rings_.load(std::memory_order_seq_cst);
  }

  void leave() { listeners_.fetch_sub(1, std::memory_order_relaxed); }

  void sleep(uint32_t rings, uint32_t bits, long milliseconds) {
    timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_nsec += milliseconds * 1000000;
    end.tv_sec += end.tv_nsec / 1000000000;
    end.tv_nsec %= 1000000000;
    syscall(SYS_futex, word(), FUTEX_WAIT_BITSET, rings, &end, nullptr, bits);
  }

 private:
  uint32_t* word() { return reinterpret_cast<uint32_t*>(&rings_); }

  std::atomic<uint32_t> rings_{0};
  std::atomic<uint32_t> listeners_{0};
};

}  // namespace fl
