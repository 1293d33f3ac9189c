#include "point_to_point.h"

#include "../common/signature.h"
#include "search.h"

namespace fl {

// The sender counts; a receiver's number only says that there is one.
std::shared_ptr<Message> PointToPoint::begin(const fl_message& message) {
  const int peer = message.peer;
  fl_message mine = message;
  fl_signature& call = mine.signature;
  call.sequence = call.verb == FL_SEND ? sequence_of(++sends_[peer]) : 1;
  auto begun = std::make_shared<Message>(mesh_, envelopes_, mine);
  begun->begin();
  return begun;
}

std::shared_ptr<Message> PointToPoint::begin_match(const fl_message& asked, fl_match& match,
                                                   Queues& queues, Waiter& waiter) {
  GlooSearch search(mesh_, envelopes_, queues, asked, waiter);
  search.run(match.patience, match.waited);
  const fl_message found = search.receive(asked, match);
  return found.peer < 0 ? nullptr : begin(found);
}

// Sends first: they need only what their receivers have begun.
void end_all(const Messages& messages, Waiter& waiter) {
  for (const bool sends : {true, false}) {
    for (const auto& message : messages) {
      if (message->sends() == sends) message->end(waiter);
    }
  }
  for (const auto& message : messages) message->settle(waiter);
}

}  // namespace fl
