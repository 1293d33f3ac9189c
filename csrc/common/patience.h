// Durations of polling waits before a thread sleeps.
#pragma once

#include "atomic.h"

namespace fl {

// Numbers of polls before a wait sleeps: polls that keep the processor, followed by polls that yield it.
struct Patience {
  int spins;
  int yields;
};

// Adapts the polling time. Each wait that polled in vain halves the polling time of the next wait. Otherwise
// polling would waste processor time if hosts are distant or threads outnumber processors. Every kTryEvery-th
// wait polls for the full time, because a wait that sleeps takes longer.
class Persistence {
 public:
  // Number of halvings of the next wait's polling time.
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

// Pause after poll number `count` of a wait, counted from 0. Answers usually arrive within some 100 ns, and
// one pause can take half of that time.
inline void pause_after(int count) {
  constexpr int kAtOnce = 32;
  if (count >= kAtOnce) pause_briefly();
}

}  // namespace fl
