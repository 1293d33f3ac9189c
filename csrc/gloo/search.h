// Finds out whose message a receive takes that does not know who sends, or how much.
#pragma once

#include <vector>

#include "../common/queues.h"
#include "envelopes.h"

namespace fl {

class Search {
 public:
  // For sends with `tag` of `peer`, whose queue the caller is in, or where that is -1 of any rank:
  // then the queue of the one that is found is entered, so that no other receive takes its message.
  Search(Mesh& mesh, Envelopes& envelopes, Queues& queues, int peer, int32_t tag);

  // The rank that sends; -1: none did within `patience` seconds, which may be negative: no limit.
  // Throws Failure, also where one of several ranks has gone: it may have been the one; where they
  // only shut down when all of them do. The caller has `waited` so many seconds before.
  int run(Waiter& waiter, double patience, double waited);
  // What that is.
  const fl_signature& offered() const { return offered_; }

 private:
  bool look(Waiter& waiter);
  void look_around(Waiter& waiter);
  std::string what_is_sent();

  Mesh& mesh_;
  Envelopes& envelopes_;
  Queues& queues_;
  const bool any_;
  const int32_t tag_;
  std::vector<int> ranks_;  // that may send
  int found_ = -1;
  fl_signature offered_{};
};

}  // namespace fl
