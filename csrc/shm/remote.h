// Reading the memory of the other ranks' processes, where the system allows it.
#pragma once

#include "../common/atomic.h"
#include "segment.h"

namespace fl {

// From here on that may pay: a system call, and a wait at the end, for half the copying.
constexpr size_t kReadBytes = sized(16 << 10, 64);

// Linux lets a process read another of the same user (process_vm_readv), unless it is configured not to:
// by Yama, by a container, by different namespaces. So it is tried.
class Remote {
 public:
  Remote(const Segment& segment, int rank, int size);

  // Whether this rank can read that one's memory, as far as is known by now. Any thread may ask.
  bool can_read(int r) { return answer(r) == kYes; }
  bool can_read_all();

  // Copy `bytes` from where they lie in rank r's process; returns how many were. Fewer where that has
  // ended, or has given up meanwhile (it may have changed or freed them then), or where the system
  // does not let them be read: memory of a device, memfd_secret, a process that became undumpable.
  // Then nothing more of that rank is taken for readable.
  size_t read(int r, uint64_t from, void* into, size_t bytes);

 private:
  enum Answer : uint8_t { kUnknown, kYes, kNo };
  Answer answer(int r);
  bool find_out(int r) const;

  const Segment& segment_;
  const int rank_, size_;
  const std::unique_ptr<uint64_t> token_;  // what the others try to read
  std::mutex mutex_;
  std::vector<Answer> answers_;  // by rank
  std::atomic<Answer> all_{kUnknown};
};

}  // namespace fl
