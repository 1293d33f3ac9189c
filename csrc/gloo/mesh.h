// What the ranks of a group send each other, on Gloo's unbound buffers and on connections that are made
// when they are needed, with failures that name ranks.
#pragma once

#include <gloo/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "abi.h"
#include "heartbeat.h"
#include "links.h"
#include "waiter.h"

namespace fl {

using Buffer = std::unique_ptr<gloo::transport::UnboundBuffer>;

// Slots keep messages of one kind apart from others on the same connection. Within a slot they
// arrive in the order they were sent, so one slot serves every operation in turn.
enum Slot : uint64_t {
  kHeaderSlot = 1,
  kControlSlot,
  kReduceSlot,
  kPartSlot,
  kEnvelopeSlot,
  kProbeSlot,
  kRelaySlot,
  kLeavingSlot,
  kFirstFreeSlot,
};

// The slot of a large payload of a message, a different one for whatever differs in `call`: FNV-1a
// over what same_message compares. That two share one is as likely as that two random numbers of
// 64 bits are the same.
uint64_t slot_of(const fl_signature& call);

// What the C ABI knows of the hosts of `size` ranks; for addresses and proofs see fl_gloo_connect.
Hosts read_hosts(const fl_hosts& given, int size, const char* addresses, size_t bytes,
                 const char* proofs);

// Another group that is to end where hosts are lost, and lives at least as long; `advice` ends what it
// reports.
struct Companion {
  void (*give_up)(void* other, const char* why);
  void* other;
  std::string advice;
};

class Mesh : public gloo::Context, public Transport, public Connections {
 public:
  Mesh(int rank, int size, const std::string& host, const std::string& interface,
       double connect_seconds);
  ~Mesh() override;

  // Up to so many ranks send each other what they call; more pass it on: see Relay.
  static constexpr int kDirect = 8;
  // To whom that goes, and from whom it comes.
  std::vector<int> neighbours() const;

  // Where peers connect to.
  const std::vector<char>& address() const { return links_->address(); }
  // Throws Failure. `addresses` holds `size` addresses of `bytes` bytes each; for `proofs` see
  // fl_gloo_connect. `lazily`: the neighbours too are connected when they are needed first.
  void connect(const char* addresses, size_t bytes, const char* proofs, bool lazily,
               Clock::time_point deadline);
  bool is_connected(int peer) const { return links_->is_connected(peer); }
  // Begin to connect to all of `peers`.
  void reach(const std::vector<int>& peers);
  // Wait until `peer` is connected, as the operation that runs on this thread may. Throws Failure.
  void require(int peer);
  // Ask for what `peer` sends in a later operation. One that has left already, after operations that
  // succeeded, makes that one fail, not this one. Throws Failure where it cannot be connected.
  void ask(gloo::transport::UnboundBuffer& buffer, int peer, uint64_t slot, size_t offset, size_t bytes);
  Packet packet(int peer) const { return Packet(links_->pair(peer)); }
  // Which rank connect() waits for just now; -1: for none.
  int awaited() const { return awaited_; }

  // Before connect(), in a group on several hosts: notice when hosts cannot be reached any more. The
  // first returns the port at which others are to ask this rank; throws.
  int listen_for_hosts();
  void watch_hosts(Hosts hosts);
  void take_along(Companion companion);

  // In a forked child, whose threads are not here.
  void close_descriptors() const noexcept {
    links_->abandon();
    if (heartbeat_ != nullptr) heartbeat_->abandon();
  }

  // What sends `bytes` bytes at `data`, or receives them there: then they are written.
  Buffer buffer(const void* data, size_t bytes) {
    return createUnboundBuffer(const_cast<void*>(data), bytes);
  }
  Watch& watch() { return watch_; }

  // Let the peers know that this rank begins no more messages, also those that connect later.
  void leave();
  bool is_leaving(int peer) override;

  bool is_lost(int peer) override;
  void read(gloo::transport::UnboundBuffer& buffer, int peer) override { links_->read(buffer, peer); }
  // What a broken connection means: which ranks are lost, or why a peer gave up. `peer` is the one
  // that was waited for, or -1.
  Failure explain(int peer, const std::string& what) override;

  // This rank has begun collective number `calls`; which of `ranks` have not, as far as is known.
  void has_called(int64_t calls) { links_->called(calls); }
  std::vector<int> not_called(const std::vector<int>& ranks, int64_t calls);

  // Whether a peer has said why it gave up.
  bool has_farewell() const;

  // Report to the others that this rank's time is up, and return who is the cause: a rank that is
  // waited for may wait itself, for another one, and then its own time is up at about this moment.
  std::vector<int> cause_of(const Failure& timeout) noexcept;

  void enforce_deadline() override {}  // the watch does, whether or not anybody asks
  void stop() override;
  Failure explain(const std::string& what) override { return explain(-1, what); }
  void give_up(const Failure& failure) noexcept override;

 private:
  struct Control;
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  // Which connections are broken, and why.
  std::map<int, std::string> broken_pairs();
  // Whose connections, of those that are `broken`, were the first to break; `peer` is waited for.
  std::vector<int> first_of(const std::map<int, std::string>& broken, int peer) const;
  // Of a connection that broke, as `is_silent` because nobody answers: return when it is known why, or there
  // is no point in waiting for that.
  void await_reason(bool is_silent);
  bool is_explained() const { return watch_.reason() || has_farewell(); }
  void post_control(int peer, gloo::transport::Pair& pair);
  void send_departure(gloo::transport::Pair& pair);
  void report_to_others(const Failure& failure);
  std::vector<int> await_cause(std::vector<int> missing);
  void lose(const Failure& failure) noexcept;
  std::string words_of(const Failure& failure) const;

  std::shared_ptr<Links> links_;
  const double connect_seconds_;
  double patience_ = 0;  // seconds in which it is known whether a host is lost; 0: that is not watched
  std::mutex reporting_;       // of what follows
  bool has_reported_ = false;  // the others know why this rank gives up
  std::atomic<int> awaited_{-1};

  std::mutex asking_;             // of is_lost
  // One per peer: why it gave up, when it has. Zeros; memory that nobody writes is never touched.
  std::unique_ptr<Control[], Free> control_;
  std::vector<Buffer> control_buffers_;
  // One per peer, not 0: it has said that it is leaving; and when that was noticed.
  std::unique_ptr<int32_t[]> departures_;
  std::unique_ptr<std::atomic<Clock::duration>[]> noticed_;
  std::vector<Buffer> departure_buffers_;
  // What this rank says then.
  int32_t own_departure_ = 1;
  Buffer own_departure_buffer_;  // null: it is not leaving
  // Who gets that: the connections, which last as long as links_; null: there is none yet.
  std::vector<gloo::transport::Pair*> connections_;
  std::mutex mutex_;  // of companions_
  std::unique_ptr<Heartbeat> heartbeat_;  // null: of a group on one host
  std::vector<Companion> companions_;
  Watch watch_{*this};  // last: it ends before what it looks at
};

}  // namespace fl
