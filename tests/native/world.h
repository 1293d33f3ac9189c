// A world of ranks in one process: a segment, and a mapping of it per rank.
#pragma once

#include "../../csrc/shm/group.h"
#include "player.h"

namespace stress {

struct World : Shape {
  // `calls`: number of calls from which the group's counters start.
  World(int ranks, uint32_t calls, const std::vector<size_t>& region_strides);

  // Call it in the thread or process of the rank.
  std::unique_ptr<fl::ShmGroup> join(int rank);

  const uint32_t calls;
  std::vector<fl::Mapping> mappings;  // by rank
  Regions regions;
};

// True if all mappings of a file have one address: ThreadSanitizer identifies memory by its address and would
// miss races between mappings.
#if defined(__SANITIZE_THREAD__)
constexpr bool kOneAddress = true;
#else
constexpr bool kOneAddress = false;
#endif

}  // namespace stress
