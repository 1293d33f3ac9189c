#include "message.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "../common/signature.h"

namespace fl {
namespace {

// Large messages move in pieces, two of them on their way at once, so that what runs beside them
// gets its turn on the connection.
constexpr size_t kPieceBytes = 4 << 20;

// How many messages that nobody takes are named.
constexpr size_t kMostNamed = 4;

int pieces_of(const fl_signature& call) {
  return is_large(call) ? static_cast<int>((bytes_of(call) + kPieceBytes - 1) / kPieceBytes) : 0;
}

// "is sending with tag 3", or "sends with tag 3".
std::string in_words(const fl_signature& call, const char* sending, const char* receiving) {
  return (call.verb == FL_SEND ? sending : receiving) + (" with tag " + std::to_string(call.root));
}

}  // namespace

Message::Message(Mesh& mesh, Envelopes& envelopes, const fl_message& mine)
    : mesh_(mesh),
      envelopes_(envelopes),
      mine_(mine.signature),
      here_(mine.site),
      data_(static_cast<char*>(mine.data)),
      peer_(mine.peer),
      slot_(slot_of(mine_)),
      envelope_(envelopes.blank()) {
  envelope_->call = mine_;
  envelope_->site = here_;
  if (is_large(mine_)) {
    payload_ = mesh.buffer(data_, bytes_of(mine_));
  } else if (sends() && mine_.count > 0) {
    std::memcpy(envelope_->payload, data_, bytes_of(mine_));
  }
}

// All pieces are asked for, but only one is sent: then nothing but the first is to be called off,
// and the sender need never wait for the receiver to end another message first.
void Message::begin() {
  const size_t bytes = bytes_of(mine_);
  for (int i = 0; !sends() && i < pieces_of(mine_); ++i) {
    const size_t at = i * kPieceBytes;
    payload_->recv(peer_, slot_, at, std::min(kPieceBytes, bytes - at));
  }
  envelopes_.give(*envelope_, peer_);
  if (!sends() || payload_ == nullptr) return;
  payload_->send(peer_, slot_, 0, std::min(kPieceBytes, bytes));
  unsettled_ = 1;
}

void Message::end(Waiter& waiter) {
  EnvelopePtr theirs = receive(waiter);
  theirs_ = theirs->call;
  there_ = theirs->site;
  waiter.sent(*envelope_->buffer, peer_);
  if (is_mismatched()) {
    call_off(waiter);
  } else if (sends()) {
    send_rest(waiter);
  } else {
    take(waiter, *theirs);
  }
  envelopes_.take_back(std::move(theirs));
  envelopes_.take_back(std::move(envelope_));
}

void Message::settle(Waiter& waiter) {
  while (unsettled_ > 0) waiter.sent(*payload_, peer_), --unsettled_;
  while (nothings_ > 0) waiter.sent(*nothing_, peer_), --nothings_;
  ended_ = true;
}

bool Message::is_mismatched() const {
  return theirs_.sequence != 0 && !same_message(mine_, theirs_);
}

Seen Message::seen() const {
  Seen seen;
  seen.reset(mesh_.size);
  seen.calls[mesh_.rank] = mine_;
  seen.calls[peer_] = theirs_;
  seen.sites[mesh_.rank] = here_;
  seen.sites[peer_] = there_;
  return seen;
}

EnvelopePtr Message::receive(Waiter& waiter) {
  const Waiter::Unmatched unmatched(waiter, {peer_});
  try {
    return envelopes_.receive(peer_, sends() ? FL_RECV : FL_SEND, mine_.root, waiter);
  } catch (const TimedOut&) {
    throw Failure(FL_TIMEOUT, {peer_}, instead());
  }
}

// What the peer does while this rank has waited for it in vain.
std::string Message::instead() {
  const auto not_taken = envelopes_.not_taken(peer_);
  if (not_taken.empty()) return "timed out";
  const std::string name = mesh_.name(peer_);
  std::string text;
  for (size_t i = 0; i < std::min(not_taken.size(), kMostNamed); ++i) {
    text += name + in_words(not_taken[i], " is sending", " is receiving") + ", ";
  }
  if (not_taken.size() > kMostNamed) {
    text += "and " + std::to_string(not_taken.size() - kMostNamed) + " more, ";
  }
  return text + "this rank" + in_words(mine_, " sends", " receives");
}

void Message::send_rest(Waiter& waiter) {
  const size_t bytes = bytes_of(mine_);
  for (int i = 1; i < pieces_of(mine_); ++i) {
    if (unsettled_ == 2) waiter.sent(*payload_, peer_), --unsettled_;
    const size_t at = i * kPieceBytes;
    payload_->send(peer_, slot_, at, std::min(kPieceBytes, bytes - at));
    ++unsettled_;
  }
}

void Message::take(Waiter& waiter, const Envelope& theirs) {
  for (int i = 0; i < pieces_of(mine_); ++i) waiter.received(*payload_, peer_);
  if (payload_ == nullptr && mine_.count > 0) std::memcpy(data_, theirs.payload, bytes_of(mine_));
}

// What one end has begun cannot be taken back: the other takes a piece that is of no use to it, and
// sends nothing into receives that wait.
void Message::call_off(Waiter& waiter) {
  if (sends()) {
    nothing_ = mesh_.buffer(nullptr, 0);
    for (; nothings_ < pieces_of(theirs_); ++nothings_) nothing_->send(peer_, slot_of(theirs_));
    return;
  }
  if (is_large(theirs_)) {
    const size_t bytes = std::min(kPieceBytes, bytes_of(theirs_));
    const std::unique_ptr<char[]> room(new char[bytes]);
    const Buffer useless = mesh_.buffer(room.get(), bytes);
    useless->recv(peer_, slot_of(theirs_));
    waiter.received(*useless, peer_);
  }
  for (int i = 0; i < pieces_of(mine_); ++i) waiter.received(*payload_, peer_);
}

}  // namespace fl
