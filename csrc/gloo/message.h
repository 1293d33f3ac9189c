// One end of a message between two ranks.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../common/signature.h"
#include "envelopes.h"

namespace fl {

// Each end sends the other an envelope with its call, so that both see a mismatch. A small payload is
// in the sender's envelope. A large one moves at the same time, but only between
// ends that agree: what they call says through which slot.
class Message {
 public:
  Message(Mesh& mesh, Envelopes& envelopes, const fl_message& mine);

  // What needs no waiting. Throws what Gloo throws where the connection is broken already.
  void begin();
  // What the other end must have begun. Throws Failure.
  void end(Waiter& waiter);
  // What the other end must have ended.
  void settle(Waiter& waiter);

  bool sends() const { return mine_.verb == FL_SEND; }
  bool has_ended() const { return ended_; }
  // The ends called different things, and nothing was changed.
  bool is_mismatched() const;
  bool is_only_compared() const { return is_compared(mine_); }
  // What was called, and where.
  Seen seen() const;

 private:
  EnvelopePtr receive(Waiter& waiter);
  std::string instead();
  void send_rest(Waiter& waiter);
  void take(Waiter& waiter, const Envelope& theirs);
  void call_off(Waiter& waiter);

  Mesh& mesh_;
  Envelopes& envelopes_;
  const fl_signature mine_;
  fl_signature theirs_{};
  fl_site here_, there_{};
  bool ended_ = false;
  char* const data_;
  const int peer_;
  const uint64_t slot_;
  EnvelopePtr envelope_;
  Buffer payload_;  // a large one
  Buffer nothing_;  // what ends the other end's receives, when the message is called off
  int unsettled_ = 0, nothings_ = 0;
};

}  // namespace fl
