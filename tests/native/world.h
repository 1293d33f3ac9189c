// A world of ranks in one process: a segment, and each rank's own mapping of it.
#pragma once

#include "../../csrc/shm/group.h"
#include "player.h"

namespace stress {

struct World : Shape {
  // `calls`: how many calls the group has made already, as far as its counters go.
  World(int ranks, uint32_t calls, const std::vector<size_t>& region_strides);

  // In the thread or process of that rank.
  std::unique_ptr<fl::ShmGroup> join(int rank);

  const uint32_t calls;
  std::vector<fl::Mapping> mappings;  // by rank
  Regions regions;
};

// Whether the ranks' mappings of a file lie at one address: ThreadSanitizer knows memory by its
// address, and would see neither races nor their absence between two mappings.
#if defined(__SANITIZE_THREAD__)
constexpr bool kOneAddress = true;
#else
constexpr bool kOneAddress = false;
#endif

}  // namespace stress
