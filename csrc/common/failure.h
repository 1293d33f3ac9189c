// Failures of an operation: the reason of the failure and the ranks that it names.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "abi.h"

namespace fl {

// For each rank, its last known call: signature, call site, and age in seconds (-1: unknown).
struct CallReport {
  std::vector<fl_signature> calls;
  std::vector<fl_site> sites;
  std::vector<double> ages;
  uint32_t ago = 0;  // for a mismatch: how many calls ago the ranks differed

  void reset(int ranks) {
    calls.assign(ranks, fl_signature{});
    sites.assign(ranks, fl_site{});
    ages.assign(ranks, -1);
  }
};

struct Failure : std::runtime_error {
  Failure(fl_status status, std::vector<int> missing, const std::string& message)
      : std::runtime_error(message), status(status), missing(std::move(missing)) {}
  fl_status status;
  std::vector<int> missing;
  CallReport report;                            // for FL_TIMEOUT and FL_PEER_LOST: the last known calls
  std::shared_ptr<const Failure> peer_failure;  // if not null, the other ranks get this failure
};

// Reason for the loss of a rank that closed its group, as a program does at its normal end.
constexpr const char* kHasLeft = "it has left the group";

// Return `message` with its source `name` appended, unless `message` already names a source.
inline std::string with_source(const std::string& message, const std::string& name) {
  const std::string end = " says";
  const bool has_source = message.size() >= end.size() &&
                       message.compare(message.size() - end.size(), end.size(), end) == 0;
  return has_source ? message : message + ", as " + name + end;
}

// Return the failure of rank `self` after `rank` has given up. `name`: the name of `rank` in error texts.
inline Failure given_up_by(int rank, const std::string& name, int self, const Failure& reason) {
  Failure forwarded(reason.status, reason.missing, with_source(reason.what(), name));
  if (std::find(reason.missing.begin(), reason.missing.end(), self) != reason.missing.end()) {
    // This rank is late and not lost. The other ranks must get the reason of `rank`, not this failure.
    Failure failure(FL_PEER_LOST, {rank}, std::string("it gave up waiting for this rank: ") + reason.what());
    failure.peer_failure = std::make_shared<const Failure>(std::move(forwarded));
    return failure;
  }
  switch (reason.status) {
    case FL_RAISED:
    case FL_HOST_LOST: return reason;
    case FL_PEER_LOST:
    case FL_TIMEOUT:
    case FL_LEAVING: return forwarded;
    default: return {FL_PEER_LOST, {rank}, std::string("it gave up: ") + reason.what()};
  }
}

// Thrown if the calls of the ranks differ. `report` contains the calls. The group remains usable.
struct Mismatch : std::exception {
  explicit Mismatch(CallReport report = {}) : report(std::move(report)) {}
  const char* what() const noexcept override { return "the calls of the ranks differ"; }
  CallReport report;
};

}  // namespace fl
