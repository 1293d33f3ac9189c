// How threads wait for what is likely to come soon.
#pragma once

#include "atomic.h"

namespace fl {

// How long a wait burns the processor before it gives it away, and then before it sleeps.
struct Patience {
  int spins;
  int yields;
};

// After look number `look` of a wait, from 0: an answer is most often some 100 ns away, and one pause
// can take half of that.
inline void pause_after(int look) {
  constexpr int kAtOnce = 32;
  if (look >= kAtOnce) pause_briefly();
}

}  // namespace fl
