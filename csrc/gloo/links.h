// Every rank listens at one port. Gloo's socket thread makes the connections, and on it both ends prove their
// membership: a rank that computes or waits still answers. Then Gloo takes over the socket.
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
  // Called on Gloo's thread with a new connection to a peer, before other threads use it. A later call could
  // block: a thread whose read of a shared pair fails keeps the pair locked until Gloo's thread is free.
  using ConnectedHandler = std::function<void(int peer, Pair& pair)>;
  // Returns the number of collectives that this rank has begun in a group, for ranks that ask.
  using Calls = std::function<int64_t(uint64_t group)>;

  // Listen, without answering yet. `listens_on`: keep listening for calls_of() after all peers are connected.
  Links(std::shared_ptr<Device> device, int rank, int size, bool listens_on);
  ~Links() override;

  // Return the listener's address in Gloo's format.
  const std::vector<char>& address() const { return address_; }

  // Call before open(): enable keep-alive; see keep_alive.
  void keep_alive_for(double seconds) { seconds_ = seconds; }
  // Begin to answer; for `addresses` and `key` see fl_connect.
  void open(const char* addresses, size_t bytes, const char* key, ConnectedHandler on_connected,
            Pair::NoteHandler note_handler, Calls calls, Parcels& parcels);
  // Close all connections and make no more. Objects that the callbacks use must live until close() returns.
  void close() noexcept;

  bool is_connected(int peer) const {
    return states_[peer].load(std::memory_order_acquire) == kConnected;
  }
  bool has_failed(int peer) const { return states_[peer] == kFailed; }
  // Return the reason why there is no connection.
  std::string problem(int peer);
  // Begin to connect to `peer`, unless this rank has already begun.
  void reach(int peer);
  // Wait for the connection. False: not connected at time `end`. Throws Failure if it cannot be made.
  bool await(int peer, Clock::time_point end);

  // Ask each of `peers` for the number of collectives of `group` that it has begun. kSilent: no answer until
  // `end`; kAbsent: no process listens there.
  std::map<int, int64_t> calls_of(const std::vector<int>& peers, uint64_t group, Clock::time_point end);
  static constexpr int64_t kSilent = -1, kAbsent = -2;

  // In a forked child: close the descriptors.
  void abandon() const noexcept { descriptors_.close_all(); }

  // Return the connection with `peer`, or null.
  Pair* pair(int peer) const {
    return is_connected(peer) ? static_cast<Pair*>(pairs_[peer].get()) : nullptr;
  }

  // Read data of `peer` on this thread, until `buffer` is filled or a short time is over. This is faster than
  // to wait until Gloo's thread and then this thread are scheduled.
  void read(gloo::transport::UnboundBuffer& buffer, int peer);

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

  const bool listens_on_;
  std::vector<char> address_;
  std::string addresses_;  // concatenated addresses of all ranks
  Prover prover_;
  ConnectedHandler on_connected_;
  Pair::NoteHandler note_handler_;
  Calls calls_;
  Parcels* parcels_ = nullptr;
  std::unique_ptr<Listener> listener_;
  const std::unique_ptr<Listener> settles_;  // for settle(): descriptors may run out later
  Descriptors descriptors_;
  double seconds_ = 0;
  Persistence reading_;
  std::unique_ptr<std::atomic<int>[]> states_;  // state of each peer; written under lock_

  std::mutex closing_;  // one thread closes; other threads wait for it
  std::mutex asking_;   // one thread asks at a time
  std::mutex lock_;     // guards the members below
  std::condition_variable changed_;
  bool is_open_ = false;
  std::map<Attempt*, std::unique_ptr<Attempt>> attempts_;
  std::vector<std::string> problems_;  // for each peer: reason why there is no connection
  std::map<int, int64_t> answers_;     // results of calls_of(): number of calls by peer
};

}  // namespace fl
