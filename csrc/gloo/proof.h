// Proofs of group membership that both ends of a connection exchange.
#pragma once

#include <string>
#include <utility>

#include "abi.h"

namespace fl {

// Return the HMAC-SHA-256 (RFC 2104) of `text`. `key` has at most 64 bytes.
std::string hmac(const std::string& key, const std::string& text);

// Computes each proof when it is needed. A table for all ranks would take megabytes and start-up time.
class Prover {
 public:
  Prover() = default;
  Prover(int rank, std::string key) : rank_(rank), key_(std::move(key)) {}

  std::string shown_to(int peer) const { return of(rank_, peer); }
  // True if the bytes at `shown` are the proof of `peer`. Takes constant time, so that an attacker cannot
  // guess the proof byte by byte.
  bool is_shown_by(int peer, const char* shown) const;

 private:
  std::string of(int source, int destination) const;

  int rank_ = -1;
  std::string key_;
};

}  // namespace fl
