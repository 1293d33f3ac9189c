// Reads from the memory of other ranks' processes, if the system permits it.
#pragma once

#include "../common/atomic.h"
#include "segment.h"

namespace fl {

// Minimum bytes for direct reads. They save one copy, but need a system call and a wait for the readers.
constexpr size_t kReadBytes = sized(16 << 10, 64);

// A process may read the memory of another process of the same user with process_vm_readv, unless Yama, a
// container or a namespace forbids it. Each rank therefore tests it.
class Remote {
 public:
  Remote(const Segment& segment, int rank, int size);

  // True if this rank has successfully read memory of rank `r`. Thread-safe.
  bool can_read(int r) { return answer(r) == kYes; }
  bool can_read_all();

  // Copy `bytes` bytes from address `from` of rank r's process. Return the number of valid bytes. It is
  // smaller if the system refuses (device memory, memfd_secret, undumpable process), or if rank r has ended
  // or given up, because its memory may be freed. Then can_read(r) is false from now on.
  size_t read(int r, uint64_t from, void* into, size_t bytes);

 private:
  enum Answer : uint8_t { kUnknown, kYes, kNo };
  Answer answer(int r);
  bool find_out(int r) const;

  const Segment& segment_;
  const int rank_, size_;
  const std::unique_ptr<uint64_t> token_;  // other ranks test whether they can read it
  std::mutex mutex_;
  std::vector<Answer> answers_;  // for each rank: whether its memory can be read
  std::atomic<Answer> all_{kUnknown};
};

}  // namespace fl
