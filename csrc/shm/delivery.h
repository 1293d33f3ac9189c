// Runs messages to their end.
#pragma once

#include <algorithm>
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

  // Throws Failure where there is no point in waiting since `since` for one of `ranks` to begin something.
  void look_around(const Peers& peers, const std::vector<int>& ranks, Clock::time_point since) const {
    if (is_awaited != nullptr && !*is_awaited) return;
    if (Clock::now() - since <= kLastMessages) return;
    const auto is_leaving = [&](int r) { return peers.is_leaving(r); };
    if (!std::all_of(ranks.begin(), ranks.end(), is_leaving)) return;
    throw Failure(FL_LEAVING, ranks, kIsLeaving);
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
