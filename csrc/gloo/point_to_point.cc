#include "point_to_point.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "../common/signature.h"

namespace fl {
namespace {

// Large messages move in pieces, two of them on their way at once, so that what runs beside them
// gets its turn on the connection.
constexpr size_t kPieceBytes = 4 << 20;

// How many messages that nobody takes are told of.
constexpr size_t kMostTold = 4;

// "is sending with tag 3", or "sends with tag 3".
std::string in_words(const fl_signature& call, const char* sending, const char* receiving) {
  return (call.verb == FL_SEND ? sending : receiving) + (" with tag " + std::to_string(call.root));
}

}  // namespace

// Both ends show each other what they call before a payload moves, so that both see a mismatch.
// The verbs differ by nature; everything else must be equal.
Told PointToPoint::meet(Call& call, Notice& notice, int peer) {
  notice.call = call.mine;
  notice.call.sequence = sequence_of(++calls_);
  const Buffer out = notices_.give(notice, peer);
  Told told = hear(call, peer, call.mine.verb == FL_SEND ? FL_RECV : FL_SEND);
  call.waiter.sent(*out, peer);
  call.seen[mesh_.rank] = notice.call;
  call.seen[peer] = told.call;
  return told;
}

Told PointToPoint::hear(const Call& call, int peer, int verb) {
  try {
    return notices_.hear(peer, verb, call.mine.root, call.waiter);
  } catch (const Failure& failure) {
    if (failure.status != FL_TIMEOUT) throw;
    throw Failure(FL_TIMEOUT, {peer}, instead(call.mine, peer));
  }
}

// What the peer does while this rank has waited for it in vain.
std::string PointToPoint::instead(const fl_signature& mine, int peer) {
  const auto unheard = notices_.unheard(peer);
  if (unheard.empty()) return "timed out";
  const std::string name = "rank " + std::to_string(peer);
  std::string told;
  for (size_t i = 0; i < std::min(unheard.size(), kMostTold); ++i) {
    told += name + in_words(unheard[i], " is sending", " is receiving") + ", ";
  }
  if (unheard.size() > kMostTold) {
    told += "and " + std::to_string(unheard.size() - kMostTold) + " more, ";
  }
  return told + "this rank" + in_words(mine, " sends", " receives");
}

void PointToPoint::send(Call& call, const void* data, int peer) {
  Notice notice;
  const bool large = is_large(call.mine);
  if (!large && call.bytes() > 0) std::memcpy(notice.payload, data, call.bytes());
  const Told told = meet(call, notice, peer);
  if (same_message(call.mine, told.call)) {
    if (large) send_large(call, data, peer);
    return;
  }
  if (is_large(told.call)) {
    // The peer has posted a receive, which cannot be taken back: an empty message ends it.
    const Buffer nothing = mesh_.buffer(nullptr, 0);
    nothing->send(peer, slot_of(kDataSlot, call.mine.root));
    call.waiter.sent(*nothing, peer);
  }
  throw Mismatch();
}

// The first piece needs not be asked for: its receive was posted before the peer gave notice. The
// last is followed by thanks: what has only been written to a socket is lost if this process ends.
void PointToPoint::send_large(Call& call, const void* data, int peer) {
  const size_t bytes = call.bytes();
  const Buffer out = mesh_.buffer(data, bytes), thanks = mesh_.buffer(nullptr, 0);
  thanks->recv(peer, slot_of(kThanksSlot, call.mine.root));
  int left = 0;
  for (size_t at = 0; at < bytes; at += kPieceBytes) {
    if (left == 2) call.waiter.sent(*out, peer), --left;
    out->send(peer, slot_of(kDataSlot, call.mine.root), at, std::min(kPieceBytes, bytes - at));
    ++left;
  }
  while (left-- > 0) call.waiter.sent(*out, peer);
  call.waiter.received(*thanks, peer);
}

void PointToPoint::recv(Call& call, void* data, int peer) {
  const bool large = is_large(call.mine);
  const Buffer into = mesh_.buffer(data, call.bytes());
  if (large) {
    into->recv(peer, slot_of(kDataSlot, call.mine.root), 0, std::min(kPieceBytes, call.bytes()));
  }
  Notice notice;
  const Told told = meet(call, notice, peer);
  if (!same_message(call.mine, told.call)) {
    if (large) call.waiter.received(*into, peer);
    throw Mismatch();
  }
  if (large) return recv_rest(call, *into, peer);
  if (call.bytes() > 0) std::memcpy(data, told.payload.data(), call.bytes());
}

void PointToPoint::recv_rest(Call& call, gloo::transport::UnboundBuffer& into, int peer) {
  const size_t bytes = call.bytes();
  for (size_t at = kPieceBytes; at < bytes; at += kPieceBytes) {
    into.recv(peer, slot_of(kDataSlot, call.mine.root), at, std::min(kPieceBytes, bytes - at));
  }
  for (size_t at = 0; at < bytes; at += kPieceBytes) call.waiter.received(into, peer);
  const Buffer thanks = mesh_.buffer(nullptr, 0);
  thanks->send(peer, slot_of(kThanksSlot, call.mine.root));
  call.waiter.sent(*thanks, peer);
}

}  // namespace fl
