// What the ranks of a group send each other, on Gloo's unbound buffers and on connections that are made
// when they are needed, with failures that name ranks.
#pragma once

#include <gloo/transport/unbound_buffer.h>

#include "abi.h"
#include "family.h"

namespace fl {

using Buffer = std::unique_ptr<Receiver>;

// Slots keep messages of one kind apart from others on the same connection. Within a slot they
// arrive in the order they were sent, so one slot serves every operation in turn.
enum Slot : uint64_t {
  kHeaderSlot = 1,
  kReduceSlot,
  kPartSlot,
  kRelaySlot,
};

// Another group that is to end where hosts are lost, and lives at least as long; `advice` ends what it
// reports.
struct Companion {
  int (*give_up)(void* other, const char* why);
  void* other;
  std::string advice;
};

class Mesh : public Transport, public Connections, public Route {
 public:
  // A group by itself; and one of `ranks` of another, this one among them, that shares its connections.
  // `number` is that of no other group that is made of these ranks, and the same on all of `ranks`.
  Mesh(int rank, int size, const std::string& host, const std::string& interface, double connect_seconds);
  Mesh(const Mesh& whole, const std::vector<int>& ranks, uint64_t number);
  ~Mesh() override;

  const int rank, size;

  // Up to so many ranks send each other what they call; more pass it on: see Relay.
  static constexpr int kDirect = 8;
  // To whom that goes, and from whom it comes.
  std::vector<int> neighbours() const;

  // Where peers connect to.
  const std::vector<char>& address() const { return family_->links->address(); }
  // Throws Failure. `addresses` holds `size` addresses of `bytes` bytes each; for `key` see
  // fl_connect. `lazily`: the neighbours too are connected when they are needed first.
  void connect(const char* addresses, size_t bytes, const char* key, bool lazily, Clock::time_point deadline);
  bool is_connected(int peer) const { return links_.is_connected(ranks_[peer]); }
  // Begin to connect to all of `peers`.
  void reach(const std::vector<int>& peers);
  // Wait until `peer` is connected, as the operation that runs on this thread may. Throws Failure.
  void require(int peer);
  Pair& pair_with(int peer) override;
  // Ask for what `peer` sends in a later operation. One that has left already, after operations that
  // succeeded, makes that one fail, not this one. Throws Failure where it cannot be connected.
  void ask(gloo::transport::UnboundBuffer& buffer, int peer, uint64_t slot, size_t offset, size_t bytes);
  // Be ready for it: as Pair::expect.
  void expect(Receiver& buffer, int peer, uint64_t slot, size_t offset, size_t bytes, bool tells);
  // What was sent at leisure goes now.
  void hurry() {
    for (int peer : neighbours()) links_.pair(ranks_[peer])->hurry();
  }
  // No call of this rank ends before the others have made it: from the beginning, of a group and its parts.
  void compare_at_once() { family_->engine.check_at_once(); }
  bool compares_at_once() const { return family_->engine.checks_at_once(); }
  // The threads of its operations.
  const std::shared_ptr<Crew>& crew() const { return family_->crew; }
  // That of its messages, which ends before it.
  std::unique_ptr<Port> port();
  // Which rank connect() waits for just now; -1: for none.
  int awaited() const { return awaited_; }

  // Before connect(), in a group on several hosts: notice when hosts cannot be reached any more. The
  // first returns the port at which others are to ask this rank; throws.
  int listen_for_hosts() { return family_->listen_for_hosts(); }
  void watch_hosts(std::shared_ptr<const Hosts> hosts) {
    family_->watch_hosts(std::move(hosts));
  }
  void take_along(Companion companion);
  // What is lost of a whole group, as this part of it has it: none where it has nothing.
  Failure as_its_own(const Failure& failure) const;
  // End, as `failure` has happened, of which the others know.
  void lose(const Failure& failure) noexcept;

  // In a forked child, whose threads are not here.
  void close_descriptors() const noexcept { family_->abandon(); }

  // What sends `bytes` bytes at `data`, or receives them there: then they are written.
  Buffer buffer(const void* data, size_t bytes) {
    return std::make_unique<Receiver>(family_->links, *this, const_cast<void*>(data), bytes);
  }

  // Let the peers know that this rank begins no more messages, also those that connect later.
  void leave();

  bool is_lost(int peer) override;
  // Whether it has closed the group, and not because it gave up.
  bool has_closed(int peer) const;
  bool has_said_all(int peer) override;
  void read(gloo::transport::UnboundBuffer& buffer, int peer) override {
    links_.read(buffer, ranks_[peer]);
  }
  // What a broken connection means: which ranks are lost, or why a peer gave up. `peer` is the one
  // that was waited for, or -1.
  Failure explain(int peer, const std::string& what) override;

  // This rank has begun collective number `calls`; which of `ranks` have not, as far as is known.
  void has_called(int64_t calls) { calls_.store(calls, std::memory_order_relaxed); }
  int64_t calls() const { return calls_.load(std::memory_order_relaxed); }
  std::vector<int> not_called(const std::vector<int>& ranks, int64_t calls);

  // Whether a peer has said why it gave up.
  bool has_farewell() const { return has_farewell_; }

  // Report to the others that this rank's time is up, and return who is the cause: a rank that is
  // waited for may wait itself, for another one, and then its own time is up at about this moment.
  std::vector<int> cause_of(const Failure& timeout) noexcept;

  void enforce_deadline() override {}  // the watch does, whether or not anybody asks
  void stop() override;
  Failure explain(const std::string& what) override { return explain(-1, what); }
  std::optional<Failure> loss_of(int peer) override;
  bool has_left(int peer) override;
  bool has_given_up(int peer) override { return is_lost(peer); }
  Failure in_full(const Failure& found) override;
  Patience patience() const override { return family_->wire.patience(); }
  void give_up(const Failure& failure) noexcept override;
  void report_to_others(const Failure& failure) noexcept;

  // For its family: what the members are told of it, one after the other, and hear from each other.
  static constexpr char kLeaving[] = "L", kClosed[] = "C", kHearsay = 'H';
  static bool is_last(const std::string& text) { return text == kClosed; }
  void hear(int peer, const std::string& text);
  // Tell the neighbours, who are connected for that, unless they are told by this rank why it gives up.
  void pass_on(const std::string& text) noexcept;
  const std::vector<int>& members() const { return ranks_; }  // as the whole counts them
  int place_of(int member) const;                             // -1: it is none
  std::vector<std::string> told;
  bool has_ended = false;

 private:
  struct Farewell;
  void wake() noexcept override { family_->wire.wake_all(); }
  Mesh(std::shared_ptr<Family> family, std::vector<int> ranks, uint64_t number, double connect_seconds);
  std::vector<int> in_whole(const std::vector<int>& ranks) const;
  // What is known of a peer.
  struct Known {
    std::shared_ptr<const Farewell> farewell;  // null: it has not given up
    Clock::time_point left_at = kNever;        // when it has said that it is leaving
    Clock::time_point closed_at = kNever;      // it has closed the group
  };
  Known known(int peer) const;
  // Who gave up, and why.
  using Said = std::pair<int, std::shared_ptr<const Farewell>>;
  Said first_farewell() const;
  void connect_neighbours(const std::vector<int>& missing) noexcept;
  // Whose connections are broken, or who has closed the group, and why.
  std::map<int, std::string> broken_peers();
  Clock::time_point end_of(int peer) const;
  // Of those that are `broken`, who was the first; `peer` is waited for.
  std::vector<int> first_of(const std::map<int, std::string>& broken, int peer) const;
  // Of a connection that broke, as `is_silent` because nobody answers: return when it is known why, or there
  // is no point in waiting for that.
  void await_reason(bool is_silent);
  Failure not_connected(int peer, const std::string& problem);
  bool is_explained() const { return reason() || has_farewell(); }
  std::vector<int> await_cause(std::vector<int> missing);
  std::string words_of(const Failure& failure) const;

  const std::shared_ptr<Family> family_;
  Links& links_ = *family_->links;
  const std::vector<int> ranks_;  // in the whole
  const double connect_seconds_;
  std::atomic<bool> has_reported_{false};  // the others know why this rank gives up
  std::atomic<bool> has_farewell_{false};  // of a peer
  std::atomic<bool> has_news_{false};      // a peer has given up, or closed the group
  std::atomic<bool> is_leaving_{false};
  std::atomic<int64_t> calls_{0};
  std::atomic<int> awaited_{-1};

  mutable std::mutex mutex_;  // of what follows
  std::vector<Known> known_;  // by rank
  Said first_{};              // of all that this rank has heard of, also from others: many are not connected
  std::vector<Companion> companions_;
};

}  // namespace fl
