// Communication of a group's ranks over Gloo buffers and lazily made connections. Failures name ranks.
#pragma once

#include <gloo/transport/unbound_buffer.h>

#include "abi.h"
#include "family.h"

namespace fl {

using Buffer = std::unique_ptr<Receiver>;

// Kinds of messages on one connection. Messages of a slot keep their order: one slot serves all operations.
enum Slot : uint64_t {
  kHeaderSlot = 1,
  kReduceSlot,
  kPartSlot,
  kRelaySlot,
};

// Another group that ends if hosts are lost, with an error that ends with `advice`. It must outlive the Mesh.
struct Companion {
  int (*give_up)(void* other, const char* why);
  void* other;
  std::string advice;
};

class Mesh : public Transport, public Connections, public Route {
 public:
  // Create a whole group; or a subgroup of `ranks`, this rank among them, with the connections of `whole`.
  // `number` identifies the subgroup: equal on all its ranks, and unique among groups with these connections.
  Mesh(int rank, int size, const std::string& host, const std::string& interface, double connect_seconds);
  Mesh(const Mesh& whole, const std::vector<int>& ranks, uint64_t number);
  ~Mesh() override;

  const int rank, size;

  // Maximum size of a group whose ranks send their calls directly. Larger groups relay the calls: see Relay.
  static constexpr int kDirect = 8;
  // Return the ranks with which this rank exchanges calls directly.
  std::vector<int> neighbours() const;

  // Return the address that peers connect to.
  const std::vector<char>& address() const { return family_->links->address(); }
  // Connect the group. Throws Failure. `addresses` holds `size` addresses of `bytes` bytes each; for `key`
  // see fl_connect. `lazily`: connect neighbours on first use as well.
  void connect(const char* addresses, size_t bytes, const char* key, bool lazily, Clock::time_point deadline);
  bool is_connected(int peer) const { return links_.is_connected(ranks_[peer]); }
  // Begin to connect to all `peers`.
  void reach(const std::vector<int>& peers);
  // Wait until `peer` is connected, with the deadline of this thread's operation. Throws Failure.
  void require(int peer);
  Pair& pair_with(int peer) override;
  // Request data that `peer` sends in a later operation. If `peer` has left after successful operations, the
  // later operation fails and not this call. Throws Failure if `peer` cannot be connected.
  void request(gloo::transport::UnboundBuffer& buffer, int peer, uint64_t slot, size_t offset, size_t bytes);
  // Announce that `peer` may send data of a later operation without a request, like Pair::expect.
  void expect(Receiver& buffer, int peer, uint64_t slot, size_t offset, size_t bytes, bool tells);
  // Send the data that earlier sends with `at_leisure` have held back.
  void hurry() {
    for (int peer : neighbours()) links_.pair(ranks_[peer])->hurry();
  }
  // Let no call, also in subgroups, return before all ranks have made it. Use it before any operation.
  void compare_at_once() { family_->engine.check_at_once(); }
  bool compares_at_once() const { return family_->engine.checks_at_once(); }
  // The threads that run the operations of this mesh.
  const std::shared_ptr<ThreadPool>& crew() const { return family_->crew; }
  // Return the port for the mesh's messages. Destroy the port before the mesh.
  std::unique_ptr<Port> port();
  // Return the rank that connect() waits for; -1: no rank.
  int awaited() const { return awaited_; }

  // Call listen_for_hosts() and watch_hosts() before connect(). listen_for_hosts() returns a port or throws.
  int listen_for_hosts() { return family_->listen_for_hosts(); }
  void watch_hosts(std::shared_ptr<const Hosts> hosts) {
    family_->watch_hosts(std::move(hosts));
  }
  void take_along(Companion companion);
  // Translate `failure` of a whole group to ranks of this subgroup. If no ranks remain, it is not affected.
  Failure for_members(const Failure& failure) const;
  // End the group with `failure`, which the other ranks know already.
  void lose(const Failure& failure) noexcept;

  // In a forked child, where the threads do not exist: close the descriptors.
  void close_descriptors() const noexcept { family_->abandon(); }

  // Return a buffer that sends `bytes` bytes at `data`, or receives into them.
  Buffer buffer(const void* data, size_t bytes) {
    return std::make_unique<Receiver>(family_->links, *this, const_cast<void*>(data), bytes);
  }

  // Announce to all peers, now or when they connect, that this rank begins no more messages.
  void leave();

  bool is_lost(int peer) override;
  // True if the peer has closed the group without giving up.
  bool has_closed(int peer) const;
  bool has_ended_sending(int peer) override;
  void read(gloo::transport::UnboundBuffer& buffer, int peer) override {
    links_.read(buffer, ranks_[peer]);
  }
  // Return the reason of a broken connection: lost ranks, or a peer's reason. `peer`: awaited rank, or -1.
  Failure explain(int peer, const std::string& what) override;

  // has_called(): this rank has begun collective `calls`. not_called(): `ranks` not known to have begun it.
  void has_called(int64_t calls) { calls_.store(calls, std::memory_order_relaxed); }
  int64_t calls() const { return calls_.load(std::memory_order_relaxed); }
  std::vector<int> not_called(const std::vector<int>& ranks, int64_t calls);

  // True if a peer has sent the reason why it gave up.
  bool has_farewell() const { return has_farewell_; }

  // Report the timeout to the other ranks and return the ranks that caused it. An awaited rank may itself
  // wait for another rank; then it times out and reports at about the same time.
  std::vector<int> cause_of(const Failure& timeout) noexcept;

  void enforce_deadline() override {}  // Watch enforces deadlines without polling by the caller
  void stop() override;
  Failure explain(const std::string& what) override { return explain(-1, what); }
  std::optional<Failure> loss_of(int peer) override;
  bool has_left(int peer) override;
  bool has_given_up(int peer) override { return is_lost(peer); }
  Failure with_details(const Failure& failure) override;
  Patience patience() const override { return family_->wire.patience(); }
  void give_up(const Failure& failure) noexcept override;
  void report_to_others(const Failure& failure) noexcept;

  // Kinds of notes between members, used by Family. receive_note() is called for each note in order.
  static constexpr char kLeaving[] = "L", kClosed[] = "C", kHearsay = 'H';
  static bool is_last(const std::string& text) { return text == kClosed; }
  void receive_note(int peer, const std::string& text);
  // Connect to the neighbours and forward `text` to them, unless this rank has given its own reason.
  void forward(const std::string& text) noexcept;
  const std::vector<int>& members() const { return ranks_; }  // ranks of the whole group
  int index_of(int member) const;                             // -1: not a member
  std::vector<std::string> notes;
  bool has_ended = false;

 private:
  struct Farewell;
  void wake() noexcept override { family_->wire.wake_all(); }
  Mesh(std::shared_ptr<Family> family, std::vector<int> ranks, uint64_t number, double connect_seconds);
  std::vector<int> to_whole(const std::vector<int>& ranks) const;
  // State of a peer.
  struct PeerState {
    std::shared_ptr<const Farewell> farewell;  // null: it has not given up
    Clock::time_point left_at = kNever;        // when it announced that it leaves
    Clock::time_point closed_at = kNever;      // when it closed the group
  };
  PeerState state_of(int peer) const;
  // A rank that gave up, with its reason.
  using PeerFarewell = std::pair<int, std::shared_ptr<const Farewell>>;
  PeerFarewell first_farewell() const;
  void connect_neighbours(const std::vector<int>& missing) noexcept;
  // Return the peers whose connections broke or that closed the group, with reasons.
  std::map<int, std::string> broken_peers();
  Clock::time_point end_of(int peer) const;
  // Return the ranks in `broken` that ended first. `peer`: the rank that this rank awaits, or -1.
  std::vector<int> first_of(const std::map<int, std::string>& broken, int peer) const;
  // Wait for the reason of a broken connection, as long as it may arrive. `is_silent`: a host did not answer.
  void await_reason(bool is_silent);
  Failure not_connected(int peer, const std::string& problem);
  bool is_explained() const { return reason() || has_farewell(); }
  std::vector<int> await_cause(std::vector<int> missing);
  std::string loss_text(const Failure& failure) const;

  const std::shared_ptr<Family> family_;
  Links& links_ = *family_->links;
  const std::vector<int> ranks_;  // ranks of the whole group
  const double connect_seconds_;
  std::atomic<bool> has_reported_{false};  // the other ranks know the reason of this rank
  std::atomic<bool> has_farewell_{false};  // a peer has sent its reason
  std::atomic<bool> has_news_{false};      // a peer has given up or closed the group
  std::atomic<bool> is_leaving_{false};
  std::atomic<int64_t> calls_{0};
  std::atomic<int> awaited_{-1};

  mutable std::mutex mutex_;  // guards the members below
  std::vector<PeerState> peer_states_;  // one entry per rank
  PeerFarewell first_farewell_{};  // the first reason received, perhaps through other ranks
  std::vector<Companion> companions_;
};

}  // namespace fl
