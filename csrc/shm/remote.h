// Reads from the memory of other ranks' processes, if the system permits.
#pragma once

#include "../common/atomic.h"
#include "segment.h"

namespace fl {

// Bytes from which a direct read may be faster: it saves one copy, but costs a system call and a final wait.
constexpr size_t kReadBytes = sized(16 << 10, 64);

// Linux lets a process read the memory of another process of the same user (process_vm_readv), unless Yama, a
// container or namespaces forbid it. Therefore each rank tests whether it can read.
class Remote {
 public:
  Remote(const Segment& segment, int rank, int size);

  // True if this rank can read the memory of rank `r`, as far as known. Thread-safe.
  bool can_read(int r) { return answer(r) == kYes; }
  bool can_read_all();

  // Copy `bytes` from address `from` of rank r's process; return the number of valid bytes. Fewer bytes are
  // valid if the rank has ended or given up, which may free its data, or if the system refuses: device
  // memory, memfd_secret, an undumpable process. Then rank r counts as unreadable.
  size_t read(int r, uint64_t from, void* into, size_t bytes);

 private:
  enum Answer : uint8_t { kUnknown, kYes, kNo };
  Answer answer(int r);
  bool find_out(int r) const;

  const Segment& segment_;
  const int rank_, size_;
  const std::unique_ptr<uint64_t> token_;  // value that other ranks try to read
  std::mutex mutex_;
  std::vector<Answer> answers_;  // for each rank: whether its memory can be read
  std::atomic<Answer> all_{kUnknown};
};

}  // namespace fl
