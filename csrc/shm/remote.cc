#include "remote.h"

#include "../common/atomic.h"

namespace fl {

Remote::Remote(const Segment& segment, int rank, int size)
    : segment_(segment), rank_(rank), size_(size), token_(std::make_unique<uint64_t>()),
      answers_(size, kUnknown) {
  RankBlock& own_block = segment.block(rank);
  // A value that probably no other process has at this address.
  *token_ = reinterpret_cast<uintptr_t>(token_.get()) * 0x9e3779b97f4a7c15u + process_id();
  own_block.token = *token_;
  own_block.token_at = reinterpret_cast<uintptr_t>(token_.get());
  answers_[rank] = kYes;
}

Remote::Answer Remote::answer(int r) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (answers_[r] == kUnknown && segment_.block(r).pid.load(std::memory_order_acquire) != 0) {
    answers_[r] = find_out(r) ? kYes : kNo;
  }
  return answers_[r];
}

bool Remote::can_read_all() {
  const Answer known_answer = all_.load(std::memory_order_relaxed);
  if (known_answer != kUnknown) return known_answer == kYes;
  Answer all = kYes;
  for (int r = 0; r < size_ && all == kYes; ++r) all = answer(r);
  all_.store(all, std::memory_order_relaxed);
  return all == kYes;
}

bool Remote::find_out(int r) const {
  const RankBlock& peer_block = segment_.block(r);
  const int32_t pid = peer_block.pid.load(std::memory_order_relaxed);  // loaded with `acquire` in answer()
  uint64_t token = 0;
  const ssize_t bytes_read = read_memory(pid, peer_block.token_at, &token, sizeof token);
  return bytes_read == sizeof token && token == peer_block.token;
}

size_t Remote::read(int r, uint64_t from, void* into, size_t bytes) {
  constexpr size_t kAtOnce = sized(16 << 20, 128);  // limits the time until the next check of the farewell
  const RankBlock& peer_block = segment_.block(r);
  const int32_t pid = peer_block.pid.load(std::memory_order_relaxed);
  char* to = static_cast<char*>(into);
  size_t done = 0;
  while (done < bytes) {
    const ssize_t bytes_read = read_memory(pid, from + done, to + done, std::min(kAtOnce, bytes - done));
    full_fence();  // read the farewell after the data
    if (bytes_read <= 0 || peer_block.farewell.is_set.value() != 0) {
      const std::lock_guard<std::mutex> lock(mutex_);
      answers_[r] = kNo;
      all_.store(kNo, std::memory_order_relaxed);
      return done;
    }
    done += static_cast<size_t>(bytes_read);
  }
  return done;
}

}  // namespace fl
