// Why an operation ended, and which ranks it is about.
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

// What ranks are known to have called, by rank: where, and how many seconds ago (-1: not known).
struct Seen {
  std::vector<fl_signature> calls;
  std::vector<fl_site> sites;
  std::vector<double> ages;
  uint32_t ago = 0;  // of a mismatch: so many calls before this one

  // Nothing yet, of any rank.
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
  Seen seen;  // of a timeout or a lost rank: the last calls
  std::shared_ptr<const Failure> for_others;  // what they are told in its place
};

// Of a rank that has closed its group, as at the normal end of its program.
constexpr const char* kHasLeft = "it has left the group";

// What a rank has said of others, with who that was; it may have heard it itself.
inline std::string as_told(const std::string& message, const std::string& who) {
  const std::string end = " says";
  const bool is_told = message.size() >= end.size() &&
                       message.compare(message.size() - end.size(), end.size(), end) == 0;
  return is_told ? message : message + ", as " + who + end;
}

// What it means for rank `self` that `rank`, who is `who`, gave up: `theirs` says why.
inline Failure given_up_by(int rank, const std::string& who, int self, const Failure& theirs) {
  Failure told(theirs.status, theirs.missing, as_told(theirs.what(), who));
  if (std::find(theirs.missing.begin(), theirs.missing.end(), self) != theirs.missing.end()) {
    // This rank is late and not lost; the others hear the reason from both.
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

// The ranks called different things; `seen` says what. The group lives on.
struct Mismatch : std::exception {
  explicit Mismatch(Seen seen = {}) : seen(std::move(seen)) {}
  const char* what() const noexcept override { return "the ranks called different things"; }
  Seen seen;
};

}  // namespace fl
