// What both ends of a connection show each other, so that no stranger takes part.
#pragma once

#include <string>
#include <utility>

#include "abi.h"

namespace fl {

// The bytes that only who knows `key`, of at most 64 bytes, can make of `text`: an HMAC of SHA-256 (RFC 2104).
std::string hmac(const std::string& key, const std::string& text);

// Of one rank of a group that has a key. Proofs are made when they are needed: a table of them would be a
// start's longest loop, and megabytes, where there are very many ranks.
class Prover {
 public:
  Prover() = default;
  Prover(int rank, std::string key) : rank_(rank), key_(std::move(key)) {}

  std::string shown_to(int peer) const { return of(rank_, peer); }
  // Whether the FL_PROOF_BYTES at `shown` are those that `peer` must show; in the same time wherever they
  // differ: how long it takes must not say how much is right.
  bool is_shown_by(int peer, const char* shown) const;

 private:
  std::string of(int source, int destination) const;

  int rank_ = -1;
  std::string key_;
};

}  // namespace fl
