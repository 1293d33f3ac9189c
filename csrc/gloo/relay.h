// Exchange of calls and small payloads among many ranks.
#pragma once

#include "abi.h"
#include "mesh.h"

namespace fl {

// Each rank first has one block: its call with the payload. In step k, each rank sends all its blocks to the
// rank whose number is 2^k higher (modulo n). So the number of blocks of each rank doubles (Bruck et al.,
// 1997), and log2(n) messages replace n-1. Not thread-safe.
class Relay {
 public:
  // Maximum total of all payloads, in bytes.
  static constexpr size_t kBytes = 64 << 10;

  explicit Relay(Mesh& mesh) : mesh_(mesh) {}

  // Request the first messages. The neighbours must be connected.
  void open() {
    const int rank = mesh_.rank, size = mesh_.size;
    const auto room = [](size_t blocks) { return blocks * (sizeof(Head) + kAlignment) + kBytes; };
    blocks_.reset(new char[room(size)]);
    for (int distance = 1; distance < size; distance *= 2) {
      Step step{(rank + distance) % size, (rank - distance + size) % size,
                static_cast<size_t>(std::min(distance, size - distance)), {}, {}, nullptr};
      for (size_t turn = 0; turn < kTurns; ++turn) {
        step.rooms[turn].reset(new char[room(step.blocks)]);
        step.receives[turn] = mesh_.buffer(step.rooms[turn].get(), room(step.blocks));
      }
      step.sends = mesh_.buffer(blocks_.get(), room(size));
      steps_.push_back(std::move(step));
    }
    for (size_t turn = 0; turn < kTurns; ++turn) {
      for (Step& step : steps_) request(step, turn);
    }
  }

  // Send `call`, `site` and the `bytes` bytes at `data` to all ranks, and receive the same from them. Throws
  // Failure.
  void exchange(const fl_signature& call, const fl_site& site, const void* data, size_t bytes, Waiter& waiter) {
    begins_.clear();
    end_ = 0;
    append({bytes, call, site, 1}, data);
    for (Step& step : steps_) {
      const size_t sent = step.blocks == begins_.size() ? end_ : begins_[step.blocks];
      step.sends->send(step.to, kRelaySlot, 0, sent);
      waiter.received(*step.receives[turn_], step.from);
      take(step.rooms[turn_].get(), step.blocks);
    }
    for (Step& step : steps_) request(step, turn_);
    turn_ = (turn_ + 1) % kTurns;
    for (Step& step : steps_) waiter.sent(*step.sends, step.to);
  }

  // Call, call site, and payload of `rank` in the last exchange.
  const fl_signature& call(int rank) const { return head(rank).call; }
  const fl_site& site(int rank) const { return head(rank).site; }
  size_t bytes(int rank) const { return head(rank).bytes; }
  const char* payload(int rank) const { return &blocks_[begins_[index_of(rank)]] + sizeof(Head); }

  // After a failed exchange: return the ranks with missing blocks.
  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int rank = 0; rank < mesh_.size; ++rank) {
      if (index_of(rank) >= begins_.size()) ranks.push_back(rank);
    }
    return ranks;
  }

  // If the neighbour `rank` has begun the next exchange, store its call in `call` and return true.
  bool is_ahead(int rank, fl_signature& call) const {
    for (const Step& step : steps_) {
      if (step.from != rank) continue;
      const Head& head = *reinterpret_cast<const Head*>(step.rooms[turn_].get());
      if (__atomic_load_n(&head.arrived, __ATOMIC_ACQUIRE) == 0) return false;
      call = head.call;
      return true;
    }
    return false;
  }

 private:
  // Number of posted receives per step. Requesting the next message early saves half a round trip.
  static constexpr size_t kTurns = 2;
  static constexpr size_t kAlignment = 16;  // bytes; for reductions of complex long double
  struct alignas(kAlignment) Head {
    uint64_t bytes;  // bytes of the payload after this Head
    fl_signature call;
    fl_site site;
    uint64_t arrived;  // nonzero after this Head has arrived
  };
  struct Step {
    int to, from;
    size_t blocks;
    std::unique_ptr<char[]> rooms[kTurns];
    Buffer receives[kTurns];
    Buffer sends;
  };

  static size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
  // Return the index of the block of `rank`. Blocks are ordered downwards from this rank (modulo n).
  size_t index_of(int rank) const { return (mesh_.rank - rank + mesh_.size) % mesh_.size; }
  const Head& head(int rank) const {
    return *reinterpret_cast<const Head*>(&blocks_[begins_[index_of(rank)]]);
  }

  void request(Step& step, size_t turn) {
    std::memset(step.rooms[turn].get(), 0, sizeof(Head));  // marks that no message has arrived
    const Buffer& receive = step.receives[turn];
    mesh_.request(*receive, step.from, kRelaySlot, 0, receive->size);
  }

  void take(const char* from, size_t blocks) {
    for (size_t i = 0; i < blocks; ++i) {
      const Head& head = *reinterpret_cast<const Head*>(from);
      append(head, from + sizeof(Head));
      from += sizeof(Head) + aligned(head.bytes);
    }
  }

  void append(const Head& head, const void* payload) {
    if (head.bytes * mesh_.size > kBytes) throw std::runtime_error("the payload is too long");
    begins_.push_back(end_);
    std::memcpy(&blocks_[end_], &head, sizeof(Head));
    if (head.bytes > 0) std::memcpy(&blocks_[end_ + sizeof(Head)], payload, head.bytes);
    end_ += sizeof(Head) + aligned(head.bytes);
  }

  Mesh& mesh_;
  std::unique_ptr<char[]> blocks_;
  std::vector<size_t> begins_;  // offsets of the blocks in blocks_
  size_t end_ = 0;
  std::vector<Step> steps_;
  size_t turn_ = 0;
};

}  // namespace fl
