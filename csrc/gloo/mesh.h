// Communication of a group's ranks over connections that are made when they are needed.
#pragma once

#include <gloo/transport/unbound_buffer.h>

#include "abi.h"
#include "family.h"

namespace fl {

using Buffer = std::unique_ptr<Receiver>;

// Kinds of messages. Messages of one slot arrive in order, so all operations can use the same slots.
enum Slot : uint64_t { kReduceSlot = 1, kPartSlot };

// Another group that ends if this group loses hosts: give_up(other, why) ends it. `why` ends with `advice`.
struct Companion {
  int (*give_up)(void* other, const char* why);
  void* other;
  std::string advice;
};

class Mesh : public Transport, public Connections, public Route {
 public:
  // Create a whole group, or a subgroup that uses the connections of `whole`. `ranks` includes this rank.
  // `number` must be equal on all ranks of the subgroup and different for each subgroup.
  Mesh(int rank, int size, const std::string& host, const std::string& interface, double connect_seconds);
  Mesh(const Mesh& whole, const std::vector<int>& ranks, uint64_t number);
  ~Mesh() override;

  const std::shared_ptr<Family> family;
  const int rank, size;

  // Maximum size of a group in which each rank sends its calls to all ranks. Larger groups forward calls.
  static constexpr int kDirect = 8;
  // Return the ranks that exchange calls directly with this rank.
  std::vector<int> neighbours() const;

  // Connect to the neighbours, or only accept connections if `lazily`. `addresses` has `size` addresses of
  // `bytes` bytes each. For `key` see fl_connect. Throws Failure.
  void connect(const char* addresses, size_t bytes, const char* key, bool lazily, Clock::time_point deadline);
  bool is_connected(int peer) const { return links_.is_connected(ranks_[peer]); }
  void reach(const std::vector<int>& peers);
  // Wait until `peer` is connected, at most until the deadline of this thread's operation. Throws Failure.
  void require(int peer);
  Pair& pair_with(int peer) override;
  // Permit `peer` to send data that a later operation needs. If the connection has ended, only that operation
  // fails. Throws Failure if `peer` cannot be connected.
  void request(gloo::transport::UnboundBuffer& buffer, int peer, uint64_t slot, size_t offset, size_t bytes);
  // Count the packets of Pair::call() from `peer` in `buffer`. take_calls() stores them in `calls`.
  void listen(Receiver& buffer, int peer) { links_.pair(ranks_[peer])->listen(buffer, group); }
  void take_calls(int peer, std::vector<ArrivedCall>& calls) const {
    calls.clear();
    if (Pair* const pair = links_.pair(ranks_[peer])) pair->take_calls(group, calls);
  }
  // Send the packets that Pair::call() has delayed. Return true if the kernel has accepted all data.
  bool hurry() {
    const auto is_busy = [&](int r) { return links_.is_connected(r) && !links_.pair(r)->hurry(); };
    return std::count_if(ranks_.begin(), ranks_.end(), is_busy) == 0;
  }
  // Return the rank that connect() is waiting for, or -1.
  int awaited() const { return awaited_; }

  void take_along(Companion companion);
  // Convert the ranks in `failure` from the whole group to this group. Ranks outside this group are dropped.
  Failure for_members(const Failure& failure) const;
  // End the group and its companions with `failure`. The heartbeats have sent it to the other ranks already.
  void lose(const Failure& failure) noexcept;

  // Return a buffer that sends from, or receives into, the `bytes` bytes at `data`.
  Buffer buffer(const void* data, size_t bytes) {
    return std::make_unique<Receiver>(family->links, *this, const_cast<void*>(data), bytes);
  }

  // Announce that this rank will start no more sends and receives, also to peers that connect later.
  void leave();

  bool is_lost(int peer) override;
  // True if the peer has closed the group without a failure.
  bool has_closed(int peer) const;
  bool has_ended_sending(int peer) override;
  void read(gloo::transport::UnboundBuffer& buffer, int peer) override { links_.read(buffer, ranks_[peer]); }
  // Return the cause of the error `what`: another rank's reason, or lost ranks. `peer`: awaited rank, or -1.
  Failure explain(int peer, const std::string& what) override;

  // has_called(): store the number of this rank's last collective. not_called(): ask `ranks` for their
  // numbers, and return the ranks that have not begun collective number `calls`.
  void has_called(int64_t calls) { calls_.store(calls, std::memory_order_relaxed); }
  int64_t calls() const { return calls_.load(std::memory_order_relaxed); }
  std::vector<int> not_called(const std::vector<int>& ranks, int64_t calls);

  // True if a rank has sent the reason why it has ended the group.
  bool has_farewell() const { return has_farewell_; }

  // Report the timeout to the other ranks. Return the ranks that caused it. If the rank that this rank awaits
  // is itself waiting for another rank, it times out at about the same time and reports that other rank.
  std::vector<int> cause_of(const Failure& timeout) noexcept;

  void stop() override;
  Failure explain(const std::string& what) override { return explain(-1, what); }
  std::optional<Failure> loss_of(int peer) override;
  bool has_left(int peer) override;
  bool has_given_up(int peer) override { return is_lost(peer); }
  Failure with_details(const Failure& failure) override;
  Patience patience() const override { return {0, GlooWire::kPolls}; }
  void give_up(const Failure& failure) noexcept override;
  void report_to_others(const Failure& failure) noexcept;

  // First bytes of notes. kLeaving: the sender has called leave(). kClosed: the sender has closed the group.
  // kHearsay: the note forwards the reason of another rank.
  static constexpr char kLeaving[] = "L", kClosed[] = "C", kHearsay = 'H';
  static bool is_last(const std::string& text) { return text == kClosed; }
  void receive_note(int peer, const std::string& text);
  // Connect to the neighbours and send them `text`, unless this rank has sent its own reason.
  void forward(const std::string& text) noexcept;
  const std::vector<int>& members() const { return ranks_; }
  int index_of(int member) const;  // -1: not a member
  std::vector<std::string> notes;
  bool has_ended = false;

 private:
  struct Farewell;
  void wake() noexcept override { family->wire.wake_all(); }
  Mesh(std::shared_ptr<Family> family, std::vector<int> ranks, uint64_t number, double connect_seconds);
  std::vector<int> to_whole(const std::vector<int>& ranks) const;
  struct PeerState {
    std::shared_ptr<const Farewell> farewell;  // reason why the peer has ended the group, or null
    Clock::time_point left_at = kNever;        // time when its kLeaving arrived
    Clock::time_point closed_at = kNever;      // time when its kClosed arrived
  };
  PeerState state_of(int peer) const;
  // A rank that has ended the group, and its reason.
  using PeerFarewell = std::pair<int, std::shared_ptr<const Farewell>>;
  PeerFarewell first_farewell() const;
  void connect_neighbours(const std::vector<int>& missing) noexcept;
  // Return the peers whose connection has ended or that have closed the group, with the error text of each.
  std::map<int, std::string> broken_peers();
  Clock::time_point end_of(int peer) const;
  // Return the ranks in `broken` that ended first. `peer` is the rank that this rank awaits, or -1.
  std::vector<int> first_of(const std::map<int, std::string>& broken, int peer) const;
  // Wait until a reason arrives, or until none can arrive any more. `is_silent`: a host did not answer.
  void await_reason(bool is_silent);
  Failure not_connected(int peer, const std::string& problem);
  bool is_explained() const { return reason() || has_farewell(); }
  std::vector<int> await_cause(std::vector<int> missing);
  std::string loss_text(const Failure& failure) const;

  Links& links_ = *family->links;
  const std::vector<int> ranks_;  // in the whole group
  const double connect_seconds_;
  std::atomic<bool> has_reported_{false};  // this rank has sent its reason
  std::atomic<bool> has_farewell_{false};  // a rank has sent its reason
  std::atomic<bool> has_news_{false};      // a peer has ended or closed the group
  std::atomic<bool> is_leaving_{false};
  std::atomic<int64_t> calls_{0};
  std::atomic<int> awaited_{-1};

  mutable std::mutex mutex_;            // guards the members below
  std::vector<PeerState> peer_states_;  // by rank
  PeerFarewell first_farewell_{};       // from a peer, or forwarded by one
  std::vector<Companion> companions_;
};

}  // namespace fl
