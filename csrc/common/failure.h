// Failures of an operation: the reason and the ranks concerned.
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

// The calls of the ranks as far as known, by rank: signature, site, and age in seconds (-1: unknown).
struct Seen {
  std::vector<fl_signature> calls;
  std::vector<fl_site> sites;
  std::vector<double> ages;
  uint32_t ago = 0;  // mismatch: number of calls since the compared one

  // Clear the entries of all ranks.
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
  Seen seen;                                  // timeout or lost rank: the last known calls
  std::shared_ptr<const Failure> for_others;  // failure to report to the other ranks instead
};

// Reason for a rank that closed its group, as at the normal end of a program.
constexpr const char* kHasLeft = "it has left the group";

// Append the source of `message` to it, unless `message` already names a source.
inline std::string as_told(const std::string& message, const std::string& who) {
  const std::string end = " says";
  const bool is_told = message.size() >= end.size() &&
                       message.compare(message.size() - end.size(), end.size(), end) == 0;
  return is_told ? message : message + ", as " + who + end;
}

// Return the failure of rank `self` after `rank`, named `who`, gave up with the failure `theirs`.
inline Failure given_up_by(int rank, const std::string& who, int self, const Failure& theirs) {
  Failure told(theirs.status, theirs.missing, as_told(theirs.what(), who));
  if (std::find(theirs.missing.begin(), theirs.missing.end(), self) != theirs.missing.end()) {
    // This rank is late, not lost. Other ranks get the reason from both ranks.
    Failure failure(FL_PEER_LOST, {rank}, std::string("it gave up waiting for this rank: ") + theirs.what());
    failure.for_others = std::make_shared<const Failure>(std::move(told));
    return failure;
  }
  switch (theirs.status) {
    case FL_RAISED:
    case FL_HOST_LOST: return theirs;
    case FL_PEER_LOST:
    case FL_TIMEOUT:
    case FL_LEAVING: return told;
    default: return {FL_PEER_LOST, {rank}, std::string("it gave up: ") + theirs.what()};
  }
}

// The calls of the ranks differ; `seen` has them. The group remains usable.
struct Mismatch : std::exception {
  explicit Mismatch(Seen seen = {}) : seen(std::move(seen)) {}
  const char* what() const noexcept override { return "the ranks called different things"; }
  Seen seen;
};

}  // namespace fl
