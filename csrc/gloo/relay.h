// How each of many ranks gets what every other one calls, and small payloads with it.
#pragma once

#include "abi.h"
#include "mesh.h"

namespace fl {

// In step k each rank sends the rank 2^k after it all that it holds, so that each holds twice as much
// (Bruck et al., 1997): log2(n) messages instead of n-1. The same reaches each rank, in blocks that are not
// changed on their way. One thread at a time may call.
class Relay {
 public:
  // What all payloads may have together.
  static constexpr size_t kBytes = 64 << 10;

  explicit Relay(Mesh& mesh);

  // Ask for the first messages; once, when the neighbours are connected.
  void open();
  // Give every rank `site`, `call` and `bytes` bytes at `data`, and get theirs. Throws Failure.
  void exchange(const fl_signature& call, const fl_site& site, const void* data, size_t bytes, Waiter& waiter);

  // Of the last exchange.
  const fl_signature& call(int rank) const { return head(rank).call; }
  const fl_site& site(int rank) const { return head(rank).site; }
  size_t bytes(int rank) const { return head(rank).bytes; }
  const char* payload(int rank) const { return &held_[begins_[place(rank)]] + sizeof(Head); }

  // The ranks of which nothing has come in an exchange that has failed.
  std::vector<int> missing() const;
  // Whether `rank`, a neighbour, has begun the next exchange, and with what call.
  bool is_ahead(int rank, fl_signature& call) const;

 private:
  // A rank that waits to be asked for a message waits half a round trip longer: the next one is asked for
  // before this rank sends the last.
  static constexpr size_t kTurns = 2;
  struct Head {
    uint64_t bytes;  // of the payload, which follows
    fl_signature call;
    fl_site site;
    uint64_t arrived;  // never 0; when it is there, so is the above
  };
  struct Step {
    int to, from;
    size_t blocks;
    std::unique_ptr<char[]> rooms[kTurns];
    Buffer receives[kTurns];
    Buffer sends;
  };

  // Blocks are held in the order in which they come: from this rank on downwards.
  size_t place(int rank) const { return (mesh_.rank - rank + mesh_.size) % mesh_.size; }
  const Head& head(int rank) const {
    return *reinterpret_cast<const Head*>(&held_[begins_[place(rank)]]);
  }
  void ask(Step& step, size_t turn);
  void take(const char* from, size_t blocks);
  void hold(const Head& head, const void* payload);

  Mesh& mesh_;
  std::unique_ptr<char[]> held_;
  std::vector<size_t> begins_;  // of the blocks in it
  size_t end_ = 0;
  std::vector<Step> steps_;
  size_t turn_ = 0;
};

}  // namespace fl
