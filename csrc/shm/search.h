// A search for messages that travel through shared memory.
#pragma once

#include <string>
#include <vector>

#include "../common/matching.h"
#include "delivery.h"
#include "message.h"
#include "peers.h"

namespace fl {

class ShmSearch final : public Search {
 public:
  ShmSearch(Mail& mail, Peers& peers, Queues& queues, const fl_message& asked);
  ~ShmSearch();

  // Until something is found, or for `patience` seconds, which may be negative: no limit. Throws
  // Failure, also where one of several ranks has gone: it may have been the one; where they only shut
  // down when all of them do.
  void run(const Waiting& waiting, double patience);

 private:
  bool has_come(int from, fl_signature& call) override;
  std::vector<int32_t> tags_of(int from) override;
  std::string name_of(int from) const override { return mail_.peers.name(from); }
  bool sleep(long milliseconds);
  bool look_around(Clock::time_point since, const Waiting& waiting);

  Mail& mail_;
  Peers& peers_;
  std::vector<Wish> wishes_;  // by place in ranks_
};

}  // namespace fl
