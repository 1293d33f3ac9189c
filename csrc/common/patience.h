// Durations of polling waits before a thread sleeps.
#pragma once

#include "atomic.h"

namespace fl {

// Numbers of polls before a wait sleeps: `spins` keep the processor, then `yields` let other threads run.
struct Patience {
  int spins;
  int yields;
};

// Pause after poll number `count`, from 0. The first polls have no pause: answers usually arrive within some
// 100 ns, and one pause can take half of that time. Later ones sometimes let another thread run: the awaited rank
// may need this processor, because other processes may use the other processors.
inline void pause_after(int count) {
  constexpr int kAtOnce = sized(32, 0), kAlone = sized(256, 0), kBetweenYields = 32;
  if (count < kAtOnce) return;
  count >= kAlone && count % kBetweenYields == 0 ? yield_processor() : pause_briefly();
}

}  // namespace fl
