// Finds out whose message a receive takes that does not know who sends, or how much.
#pragma once

#include <vector>

#include "../common/queues.h"
#include "delivery.h"
#include "message.h"
#include "peers.h"

namespace fl {

class Search {
 public:
  // For offers with `tag` of `peer`, whose queue the caller is in, or where that is -1 of any rank:
  // then the queue of the one that is found is entered, so that no other receive takes its message.
  Search(Mail& mail, Peers& peers, Queues& queues, int peer, int32_t tag);
  ~Search();
  Search(const Search&) = delete;

  // The rank that offers; -1: none did within `patience` seconds, which may be negative: no limit.
  // Throws Failure, also where one of several ranks has gone: it may have been the one; where they
  // only shut down when all of them do.
  int run(const Waiting& waiting, double patience);
  // What that is.
  const fl_signature& offered() const { return offered_; }

 private:
  bool look();
  bool sleep(long milliseconds);
  void look_around(Clock::time_point since, const Waiting& waiting);
  std::string what_is_sent();

  Mail& mail_;
  Peers& peers_;
  Queues& queues_;
  const bool any_;
  const int32_t tag_;
  std::vector<int> ranks_;     // that may send
  std::vector<Wish> wishes_;  // by place in ranks_
  int found_ = -1;
  fl_signature offered_{};
};

}  // namespace fl
