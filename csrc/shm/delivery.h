// Runs messages to their end.
#pragma once

#include <vector>

#include "message.h"
#include "peers.h"

namespace fl {

// How a thread waits for messages, and for how long at most without any progress.
struct Waiting {
  double seconds;
  InterruptCheck interrupt;  // on the caller's own thread
  Patience patience;
  const std::atomic<bool>* is_awaited = nullptr;  // null: it is the caller's thread

  // Whether there is no point in waiting since `since` for `peer` to begin something.
  bool is_in_vain(const Peers& peers, int peer, Clock::time_point since) const {
    return (is_awaited == nullptr || *is_awaited) && peers.is_leaving(peer) &&
           Clock::now() - since > kLastMessages;
  }
};

// Step on with all of `messages` at once, on this thread, until each of them has ended. Throws
// Failure where one never will; what has not ended then never will either.
void deliver(Mail& mail, Peers& peers, const std::vector<Message*>& messages,
             const Waiting& waiting);

// Step on with all of `messages`, for so many looks in a row at which none of them does; whether all have
// ended. Never sleeps; without a processor for each rank it looks once.
bool deliver_within(const Peers& peers, const std::vector<Message*>& messages, int spins);

// Step on with all of `messages` for a moment, in which peers that exchange with this rank at the same
// time are likely to do their part; some may not have ended then.
void deliver_briefly(const Peers& peers, const std::vector<Message*>& messages);

}  // namespace fl
