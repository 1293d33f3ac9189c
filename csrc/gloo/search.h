// A search for messages that travel through Gloo.
#pragma once

#include <string>
#include <vector>

#include "../common/matching.h"
#include "envelopes.h"

namespace fl {

class GlooSearch final : public Search {
 public:
  GlooSearch(Mesh& mesh, Envelopes& envelopes, Queues& queues, const fl_message& asked,
             Waiter& waiter);

  // Until something is found, or for `patience` seconds, which may be negative: no limit. Throws
  // Failure, also where one of several ranks has gone: it may have been the one; where they only shut
  // down when all of them do. The caller has `waited` so many seconds before.
  void run(double patience, double waited);

 private:
  bool has_come(int from, fl_signature& call) override;
  std::vector<int32_t> tags_of(int from) override;
  std::string name_of(int from) const override { return mesh_.name(from); }
  void look_around();

  Mesh& mesh_;
  Envelopes& envelopes_;
  Waiter& waiter_;
};

}  // namespace fl
