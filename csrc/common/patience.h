// Durations of polling waits before a thread sleeps.
#pragma once

#include "atomic.h"

namespace fl {

// Numbers of polls before a wait sleeps: `spins` keep the processor, then `yields` let other threads run.
struct Patience {
  int spins;
  int yields;
};

// Adapts the polling time. If a wait polled without success, the next wait polls half as long. Otherwise
// polling would waste processor time if hosts are distant or threads outnumber processors. Every kTryEvery-th
// wait polls for the full time, because a wait that sleeps takes longer.
class Persistence {
 public:
  // Return how many times to halve the polling time of the next wait.
  int halvings() const {
    const bool tries = waits_.load(std::memory_order_relaxed) % kTryEvery == 0;
    return tries ? 0 : vain_.load(std::memory_order_relaxed);
  }
  void has_waited(bool in_vain) {
    const int vain = vain_.load(std::memory_order_relaxed);
    const bool tried = waits_.fetch_add(1, std::memory_order_relaxed) % kTryEvery == 0;
    vain_.store(!in_vain ? (tried ? 0 : vain / 2) : vain < kMostVain ? vain + 1 : vain, std::memory_order_relaxed);
  }

 private:
  static constexpr int kMostVain = 6;
  static constexpr unsigned kTryEvery = 8;
  std::atomic<int> vain_{0};
  std::atomic<unsigned> waits_{0};
};

// Pause after poll number `count`, from 0. The first polls have no pause: answers usually arrive within some
// 100 ns, and one pause can take half of that time.
inline void pause_after(int count) {
  constexpr int kAtOnce = 32;
  if (count >= kAtOnce) pause_briefly();
}

}  // namespace fl
