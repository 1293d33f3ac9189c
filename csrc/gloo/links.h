// Connections between ranks. Every rank listens at one port. Gloo's thread accepts connections and checks the
// proofs of membership, so that a rank answers while it computes or waits. A Pair then uses the socket.
#pragma once

#include <map>

#include "../common/operation.h"
#include "abi.h"
#include "descriptors.h"
#include "pair.h"
#include "proof.h"

namespace fl {

class Links : public Context {
 public:
  // Gloo's thread calls it before other threads use the new connection, so a send in it cannot block. Later,
  // a send could: another thread whose read fails keeps the pair locked until Gloo's thread is free.
  using ConnectedHandler = std::function<void(int peer, Pair& pair)>;
  // Returns the number of collectives that this rank has begun in `group`.
  using Calls = std::function<int64_t(uint64_t group)>;

  // Listen, but accept no connections before open(). If `listens_on`, listen until close(): see calls_of().
  Links(std::shared_ptr<Device> device, int rank, int size, bool listens_on);
  ~Links() override;

  // Return the listener's address in Gloo's format.
  const std::vector<char>& address() const { return address_; }

  // Enable keep-alive for connections that are made later: see keep_alive().
  void keep_alive_for(double seconds) { seconds_ = seconds; }
  // Begin to accept connections. For `addresses` and `key` see fl_connect.
  void open(const char* addresses, size_t bytes, const char* key, ConnectedHandler on_connected,
            Pair::NoteHandler note_handler, Calls calls, Parcels& parcels);
  // Close all connections, and make no new ones. Objects that callbacks use must exist until it returns.
  void close() noexcept;

  bool is_connected(int peer) const {
    return states_[peer].load(std::memory_order_acquire) == kConnected;
  }
  bool has_failed(int peer) const { return states_[peer] == kFailed; }
  // Return the reason why `peer` is not connected.
  std::string problem(int peer);
  // Begin to connect to `peer`. Does nothing if this rank has begun already.
  void reach(int peer);
  // Connect to `peer`. Return false if it is not connected at `end`. Throws Failure if it cannot be reached.
  bool await(int peer, Clock::time_point end);

  // Ask each of `peers` for the number of collectives of `group` that it has begun. The result is kSilent if
  // a peer does not answer until `end`, and kAbsent if no process listens at its address.
  std::map<int, int64_t> calls_of(const std::vector<int>& peers, uint64_t group, Clock::time_point end);
  static constexpr int64_t kSilent = -1, kAbsent = -2;

  // In a forked child: close the descriptors.
  void abandon() const noexcept { descriptors_.close_all(); }

  Pair* pair(int peer) const {
    return is_connected(peer) ? static_cast<Pair*>(pairs_[peer].get()) : nullptr;
  }

  // Read data of `peer` on this thread for a short time, or until `buffer` has received a message. This is
  // faster than a wake-up of Gloo's thread and then of this thread.
  void read(gloo::transport::UnboundBuffer& buffer, int peer);
  // After poll number `polls` of a wait: let other threads run, or sleep until one of `pairs` has data to read.
  static void rest(const std::vector<Pair*>& pairs, int polls);
  // Before a wait: send the delayed packets that other ranks await.
  void hurry() const;

 private:
  enum State { kNone, kConnecting, kConnected, kFailed };
  class Listener;
  class Attempt;

  void begin(int peer, std::optional<uint64_t> asks_of = {});
  void accept();
  bool has_slot(Attempt& attempt);
  void adopt(Attempt& attempt);
  void explain(int peer, const std::string& problem);
  void ended(Attempt& attempt, const std::string& problem, bool is_refused);
  void remove(int socket) const noexcept;
  void settle() const;
  void set_alarm() noexcept;
  void ring();

  const bool listens_on_;
  std::vector<char> address_;
  std::string addresses_;  // concatenated addresses of all ranks
  Prover prover_;
  ConnectedHandler on_connected_;
  Pair::NoteHandler note_handler_;
  Calls calls_;
  Parcels* parcels_ = nullptr;
  std::unique_ptr<Listener> listener_;
  const std::unique_ptr<Listener> timer_;  // for alarms and settle()
  std::atomic<bool> is_set_{false};        // the timer runs
  Descriptors descriptors_;
  double seconds_ = 0;
  std::unique_ptr<std::atomic<int>[]> states_;  // a State for each peer; written under lock_

  std::mutex closing_;  // held by close(): a second caller waits for the first
  std::mutex asking_;   // held by calls_of(), so that only one thread uses answers_
  std::mutex lock_;     // guards the members below
  std::condition_variable changed_;
  bool is_open_ = false;
  std::map<Attempt*, std::unique_ptr<Attempt>> attempts_;
  std::vector<std::string> problems_;  // index: peer; why there is no connection
  std::map<int, int64_t> answers_;     // key: peer; the answer for calls_of()
};

}  // namespace fl
