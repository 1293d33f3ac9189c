#include "point_to_point.h"

#include <utility>

#include "../common/signature.h"

namespace fl {

PointToPoint::Messages PointToPoint::begin(const fl_message* messages, int count) {
  Messages begun;
  for (int i = 0; i < count; ++i) {
    fl_signature mine = messages[i].signature;
    const int peer = messages[i].peer;
    // The sender counts; a receiver's number only says that there is one.
    mine.sequence = mine.verb == FL_SEND ? sequence_of(++sends_[peer]) : 1;
    begun.push_back(std::make_unique<Message>(mesh_, notices_, mine, messages[i].data, peer));
    begun.back()->begin();
  }
  return begun;
}

// Sends first: they need only what their receivers have begun.
void PointToPoint::end(const Messages& messages, Waiter& waiter, std::vector<fl_signature>& seen) {
  bool agreed = true;
  for (const bool sends : {true, false}) {
    for (const auto& message : messages) {
      if (message->sends() != sends) continue;
      std::vector<fl_signature> seen_now(seen.size());
      const bool agrees = message->end(waiter, seen_now);
      if (agreed) seen = std::move(seen_now);
      agreed = agreed && agrees;
    }
  }
  for (const auto& message : messages) message->settle(waiter);
  if (!agreed) throw Mismatch();
}

}  // namespace fl
