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

  explicit Relay(Mesh& mesh) : mesh_(mesh), inboxes_(mesh.size) {}

  // Listen to the neighbours, which must be connected.
  void open() {
    for (int distance = 1; distance < mesh_.size; distance *= 2) listen(source(distance));
  }

  // Send `call`, `site` and the `bytes` bytes at `data` to all ranks, and receive the same from them. Throws
  // Failure.
  void exchange(const fl_signature& call, const fl_site& site, const void* data, size_t bytes, Waiter& waiter) {
    begins_.clear();
    blocks_.clear();
    append({bytes, call, site}, static_cast<const char*>(data));
    for (int distance = 1; distance < mesh_.size; distance *= 2) {
      const size_t blocks = std::min(distance, mesh_.size - distance);
      const size_t sent = blocks == begins_.size() ? blocks_.size() : begins_[blocks];
      send((mesh_.rank + distance) % mesh_.size, blocks_.data(), sent);
      take(receive(source(distance), waiter).memory.get(), blocks);
    }
  }

  // Send and receive data of the call after its exchange. The received data is valid until the next receive().
  void send(int to, const char* data, size_t bytes) {
    mesh_.pair_with(to).call(mesh_.group, 0, {{const_cast<char*>(data), bytes}, {}}, Pair::kNow);
  }
  const Parcel& receive(int from, Waiter& waiter) {
    Inbox& inbox = inboxes_[from];
    if (inbox.counter == nullptr) listen(from);
    if (inbox.waiting.empty()) mesh_.take_calls(from, inbox.waiting);
    while (inbox.waiting.empty()) {
      waiter.received(*inbox.counter, from);
      mesh_.take_calls(from, inbox.waiting);
    }
    inbox.last = std::move(inbox.waiting.front().parcel);
    inbox.waiting.erase(inbox.waiting.begin());
    return *inbox.last;
  }

  // Call, call site, and payload of `rank` in the last exchange.
  const fl_signature& call(int rank) const { return head(rank).call; }
  const fl_site& site(int rank) const { return head(rank).site; }
  size_t bytes(int rank) const { return head(rank).bytes; }
  // Return the payload of `rank`, or the data of the last receive(), or null.
  const char* payload(int rank) const {
    if (bytes(rank) > 0) return &blocks_[begins_[index_of(rank)]] + sizeof(Head);
    return inboxes_[rank].last ? inboxes_[rank].last->memory.get() : nullptr;
  }

  // After a failed exchange: return the ranks with missing blocks.
  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int rank = 0; rank < mesh_.size; ++rank) {
      if (index_of(rank) >= begins_.size()) ranks.push_back(rank);
    }
    return ranks;
  }

  // If the neighbour `rank` has begun the next exchange, store its call in `call` and return true.
  bool is_ahead(int rank, fl_signature& call) {
    Inbox& inbox = inboxes_[rank];
    if (inbox.counter != nullptr && inbox.waiting.empty()) mesh_.take_calls(rank, inbox.waiting);
    if (inbox.waiting.empty()) return false;
    call = reinterpret_cast<const Head*>(inbox.waiting[0].parcel.memory.get())->call;
    return true;
  }

 private:
  static constexpr size_t kAlignment = 16;  // bytes; for reductions of complex long double
  struct alignas(kAlignment) Head {
    uint64_t bytes;  // bytes of the payload after this Head
    fl_signature call;
    fl_site site;
  };
  // Packets from one rank.
  struct Inbox {
    Buffer counter;
    std::vector<ArrivedCall> waiting;
    std::optional<Parcel> last;
  };

  static size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
  int source(int distance) const { return (mesh_.rank - distance + mesh_.size) % mesh_.size; }
  // Return the index of the block of `rank`. Blocks are ordered downwards from this rank (modulo n).
  size_t index_of(int rank) const { return source(rank); }
  const Head& head(int rank) const {
    return *reinterpret_cast<const Head*>(&blocks_[begins_[index_of(rank)]]);
  }

  void listen(int rank) {
    if (!mesh_.is_connected(rank)) mesh_.require(rank);
    inboxes_[rank].counter = mesh_.buffer(nullptr, 0);
    mesh_.listen(*inboxes_[rank].counter, rank);
  }

  void take(const char* from, size_t blocks) {
    for (size_t i = 0; i < blocks; ++i) {
      const Head& head = *reinterpret_cast<const Head*>(from);
      append(head, from + sizeof(Head));
      from += sizeof(Head) + aligned(head.bytes);
    }
  }

  void append(const Head& head, const char* payload) {
    if (head.bytes * mesh_.size > kBytes) throw std::runtime_error("the payload is too long");
    begins_.push_back(blocks_.size());
    const char* const bytes = reinterpret_cast<const char*>(&head);
    blocks_.insert(blocks_.end(), bytes, bytes + sizeof(Head));
    if (head.bytes > 0) blocks_.insert(blocks_.end(), payload, payload + head.bytes);
    blocks_.resize(aligned(blocks_.size()));
  }

  Mesh& mesh_;
  std::vector<Inbox> inboxes_;  // by rank
  std::vector<char> blocks_;
  std::vector<size_t> begins_;  // offsets of the blocks in blocks_
};

}  // namespace fl
