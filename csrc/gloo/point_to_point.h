// Messages between two ranks, as operations.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "abi.h"
#include "message.h"

namespace fl {

class PointToPoint {
 public:
  explicit PointToPoint(Mesh& mesh) : mesh_(mesh), notices_(mesh), sends_(mesh.size) {}

  // Once, when every peer is connected.
  void open() { notices_.open(); }

  // Begin messages, of lanes that are idle. Does not wait. Throws what Gloo throws where a
  // connection is broken already.
  using Messages = std::vector<std::unique_ptr<Message>>;
  Messages begin(const fl_message* messages, int count);

  // Throws Failure, or Mismatch: then `seen` is of the first message whose ends differ, and the
  // others have ended well.
  void end(const Messages& messages, Waiter& waiter, std::vector<fl_signature>& seen);

 private:
  Mesh& mesh_;
  Notices notices_;
  std::vector<std::atomic<uint32_t>> sends_;  // to each peer so far
};

}  // namespace fl
