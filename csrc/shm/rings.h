// Records between the ranks of one host. Each pair of ranks has one ring in shared memory per direction.
#pragma once

#include <unordered_set>

#include "../common/engine.h"
#include "remote.h"
#include "segment.h"

namespace fl {

class Rings final : public Wire {
 public:
  Rings(Segment& segment, Remote& remote, int rank, int size);

  size_t eager_bytes() const override { return std::min(kInlineBytes, segment_.data_bytes() / 4); }
  size_t most_bytes() const override { return segment_.data_bytes() / 4; }
  Room reserve(int peer, size_t bytes) override;
  void send(int peer, const Room& room) override;
  Room next(int peer) override;
  void drop(int peer) override;
  void forget(uint64_t group) override { left_groups_.insert(static_cast<uint32_t>(group)); }
  Choice* choice(int peer) override { return &ends_[peer].choice; }
  bool can_read(int peer) override { return remote_.can_read(peer); }
  size_t read(int peer, uint64_t address, void* into, size_t bytes) override {
    return remote_.read(peer, address, into, bytes);
  }
  uint32_t begin_wait() override { return futex().begin_wait(); }
  void wait(uint32_t since, bool as_caller, long milliseconds) override {
    futex().wait(since, as_caller ? kCallers : kThread, milliseconds);
  }
  void end_wait() override { futex().end_wait(); }
  void wake(bool callers) override { futex().wake(callers ? kCallers : kThread); }

  // State of the rings to and from one peer. The numbers wrap around.
  struct Ends {
    uint32_t sent = 0, seen_drained = 0;  // number of records
    uint32_t at = 0, drained_at = 0;      // bytes: `at` written, `drained_at` released by the peer
    uint32_t reserved_at = 0;
    std::vector<uint32_t> ends;  // for each record in the ring: value of `at` after its data
    uint32_t received = 0;       // number of records
    Choice choice{2};
  };

 private:
  static constexpr uint32_t kCallers = 1, kThread = 2;

  Futex& futex() { return segment_.block(rank_).futex; }

  Segment& segment_;
  Remote& remote_;
  const int rank_;
  std::unique_ptr<Ends[]> ends_;  // by rank
  std::unordered_set<uint32_t> left_groups_;
};

}  // namespace fl
