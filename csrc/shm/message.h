// Messages from one rank to another: matched by tag, beside each other and beside collectives.
//
// The sender puts an offer into a table that it shares with the receiver, with the data if that is
// small and the place for it free, and announces it by a line that the receiver looks at. Whoever
// receives takes the oldest offer with its tag, compares what the two have called, and answers. The rest of a long message is then read from the sender's
// memory, or flows through the pieces of the channel: one message at a time, in the order in which
// they were accepted, so that all of them come to their end. What one end does is done by any of its threads, under the end's lock;
// what the other end reads is written by atomics, and the futex is woken.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../common/signature.h"
#include "peers.h"
#include "remote.h"
#include "segment.h"

namespace fl {

// This rank's end of the channel to a peer, shared by the threads that send there.
struct Outbox {
  std::mutex mutex;
  uint32_t posted = 0;            // offers so far
  uint64_t taken = 0;             // bits: places of the table with an offer in them
  bool eager_taken = false;       // the piece for data that comes with an offer
  int short_of_places = 0;        // sends that wait for one
  std::atomic<uint32_t> turn{0};  // the accepted message whose pieces flow
};

// This rank's end of the channel from a peer.
struct Inbox {
  struct Known {
    uint32_t number;
    Envelope envelope;
  };
  std::mutex mutex;
  std::vector<Known> known;       // offers that wait for a receive, oldest first
  std::atomic<uint32_t> seen{0};  // offers that were known so far; changes under the mutex
  uint32_t accepted = 0;          // long messages that flow, or did
  Choice choice{1};               // of how they come
  std::atomic<uint32_t> turn{0};  // the accepted message whose pieces flow
};

// The tag that a receive waits for, as the sender can look it up. The inbox's mutex is held.
class Wish {
 public:
  // False where it was declared before, or there is no room.
  bool declare(Channel& channel, int32_t tag);
  void withdraw(Channel& channel);

 private:
  uint32_t place_ = kWanted;
};

// Both ends of all channels of this rank.
class Mail {
 public:
  Mail(Segment& segment, Peers& peers, Remote& remote, int rank, int size);

  Outbox& to(int peer) { return outboxes_[peer]; }
  Inbox& from(int peer) { return inboxes_[peer]; }
  // Whether `peer` has an offer that is not known yet, where `seen` are.
  bool has_offer(int peer, uint32_t seen) const;
  // Move new offers of `peer` into the list of those that are known. The inbox's mutex is held.
  void read_offers(int peer);

  Segment& segment;
  Peers& peers;
  Remote& remote;
  const int rank, size;
  std::atomic<uint32_t> searches{0};  // for messages of any rank, so far

 private:
  std::unique_ptr<Outbox[]> outboxes_;
  std::unique_ptr<Inbox[]> inboxes_;
};

// Of the futex that is woken for messages between two ranks.
inline uint32_t bits_of(int from, int to) { return 1u << ((from * 5 + to) % 32); }

constexpr size_t kLeastPiece = 8 << 10;

// One send or receive. It goes on where step() is called, which never blocks; it must be called
// until the message has ended, on one thread at a time.
class Message {
 public:
  virtual ~Message() = default;

  // Do what can be done now; whether anything could.
  virtual bool step() = 0;
  // Called once before a longer wait.
  virtual void settle() {}
  // Whether the peer has begun it too.
  virtual bool is_matched() const = 0;
  // What the peer does instead, after a wait in vain.
  virtual std::string what_keeps_it() = 0;

  // Not before that one has ended. null: at once.
  void follow(const Message* earlier) { earlier_ = earlier; }
  bool may_step() const { return !ended_ && (earlier_ == nullptr || earlier_->ended_); }

  bool has_ended() const { return ended_; }
  // The ends called different things; nothing was moved.
  bool is_mismatched() const { return mismatched_; }
  bool is_only_compared() const { return is_compared(mine_); }
  // What both have called, and where, once they know of each other.
  Seen seen() const;

  int peer() const { return from_ == mail_.rank ? to_ : from_; }
  // Of the futex that is woken for it.
  uint32_t bits() const { return bits_of(from_, to_); }

 protected:
  Message(Mail& mail, const fl_message& mine, int from, int to);
  // Several pieces even of what would fit one, so that filling and draining overlap.
  size_t piece_size(size_t at) const {
    const size_t part = std::max(kLeastPiece, bytes_ / kPieces);
    return std::min({mail_.segment.piece_bytes(), part, bytes_ - at});
  }
  void wake_peer() { mail_.segment.block(peer()).futex.wake(bits()); }
  std::string peer_is(const char* doing, const std::vector<int32_t>& tags) const;
  void wake_own() { mail_.segment.block(mail_.rank).futex.wake(bits()); }

  Mail& mail_;
  const int from_, to_;
  Channel& channel_;
  const size_t bytes_;
  fl_signature mine_, theirs_{};
  fl_site here_, there_{};
  bool ended_ = false, mismatched_ = false;

 private:
  const Message* earlier_ = nullptr;
};

// Equal for two calls that same_message() finds the same, different (by 64 bits) for others.
uint64_t digest_of(const fl_signature& call);

std::unique_ptr<Message> make_send(Mail& mail, const fl_message& mine);
std::unique_ptr<Message> make_receive(Mail& mail, const fl_message& mine);

// What the ends announce to each other, in one order with the futex: see there.
inline void publish(std::atomic<uint32_t>& counter, uint32_t value) {
  counter.exchange(value, std::memory_order_seq_cst);
}

inline uint32_t look(const std::atomic<uint32_t>& counter) {
  return counter.load(std::memory_order_seq_cst);
}

}  // namespace fl
