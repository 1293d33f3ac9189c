// A connection that is being made, until both ends have proven who they are.
#pragma once

#include "abi.h"
#include "pair.h"

namespace fl {

class Links;

// What each end sends: first the one that connects, then, where that is in order, the other.
struct Greeting {
  int32_t rank;
  int32_t asks;    // not to be connected, but how many collectives the other has begun
  uint64_t group;  // in this one
  int64_t calls;   // the answer
  char proof[FL_PROOF_BYTES];
};

// Events come on Gloo's thread.
class Attempt : public Handler {
 public:
  static constexpr char kStranger[] = "who connected in its place does not know the secret of this job";

  // To `peer`, by a socket that is connecting, maybe only to ask what it has called in a group; or by one
  // that was accepted, of whoever it is (-1).
  Attempt(Links& links, int socket, int peer, std::optional<uint64_t> asks_of = {});
  ~Attempt() override;
  Attempt(const Attempt&) = delete;

  void handleEvents(int events) override;
  // Have it end itself; from any thread.
  void cancel() noexcept;

  const int socket;
  const bool is_ours;
  int peer;
  std::optional<uint64_t> asks_of;
  int64_t calls = 0;  // the answer
  bool has_place = false;  // of one that was accepted: it is the one for this peer
  bool is_taken = false;   // the socket is Gloo's

 private:
  void serve();
  void greet();
  void answer(const Greeting& greeting);
  bool receive();

  Links& links_;
  bool is_connected_;
  Greeting theirs_{};
  size_t received_ = 0;
};

}  // namespace fl
