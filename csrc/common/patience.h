// How threads wait for what is likely to come soon.
#pragma once

#include "atomic.h"

namespace fl {

// How long a wait burns the processor before it gives it away, and then before it sleeps.
struct Patience {
  int spins;
  int yields;
};

// How long to look for what is waited for: half as long after a wait for which that was in vain, and so on, so that
// nobody burns what others need where hosts are far, or threads more than processors. Every so many waits the whole
// time is tried again, as waits in which nobody looks are longer.
class Persistence {
 public:
  // How often the time of the next wait is halved.
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

// After look number `look` of a wait, from 0: an answer is most often some 100 ns away, and one pause
// can take half of that.
inline void pause_after(int look) {
  constexpr int kAtOnce = 32;
  if (look >= kAtOnce) pause_briefly();
}

}  // namespace fl
