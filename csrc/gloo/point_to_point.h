// Messages between two ranks, several at once on one thread.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "../common/queues.h"
#include "abi.h"
#include "message.h"

namespace fl {

class PointToPoint {
 public:
  explicit PointToPoint(Mesh& mesh) : mesh_(mesh), envelopes_(mesh), sends_(mesh.size) {}

  // Once, when every peer is connected.
  void open() { envelopes_.open(); }

  // Make a message, and do what needs no waiting. Throws what Gloo throws where the connection is
  // broken already.
  std::shared_ptr<Message> begin(const fl_message& message);

  // Make the message that a receive with `match` takes, and begin it; null: none has come in time.
  // Where any rank may send, the queue of the one that does has been entered. Throws Failure.
  std::shared_ptr<Message> begin_match(const fl_message& asked, fl_match& match, Queues& queues,
                                       Waiter& waiter);

 private:
  Mesh& mesh_;
  Envelopes envelopes_;
  std::vector<std::atomic<uint32_t>> sends_;  // to each peer so far
};

// Messages of different queues. Throws Failure: then those that have not ended never will.
using Messages = std::vector<std::shared_ptr<Message>>;
void end_all(const Messages& messages, Waiter& waiter);

}  // namespace fl
