// Connections between the ranks of a group, and of those that are made of it, each made when it is first
// needed, by whichever end needs it.
//
// Every rank listens at one port. Connections are made, and both ends prove that they belong to the
// group, on the thread of Gloo that serves its sockets: a rank that computes, or waits for another one,
// answers all the same. Then Gloo gets the socket.
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
  // Of a peer: a connection to it was made, on Gloo's thread, which nobody else has yet. A thread that fails
  // to read from one that others have keeps it locked until that thread has gone round.
  using Made = std::function<void(int peer, Pair& pair)>;
  // What this rank answers who asks how many collectives it has begun in a group.
  using Calls = std::function<int64_t(uint64_t group)>;

  // Listens, and answers nobody yet. `listens_on`: also when all are connected, for calls_of.
  Links(std::shared_ptr<Device> device, int rank, int size, bool listens_on);
  ~Links() override;

  // Where others connect to, as Gloo writes addresses.
  const std::vector<char>& address() const { return address_; }

  // Before open(): have the kernel watch over the connections; see keep_alive.
  void keep_alive_for(double seconds) { seconds_ = seconds; }
  // Begin to answer; for `addresses` and `key` see fl_connect.
  void open(const char* addresses, size_t bytes, const char* key, Made made, Pair::Told told, Calls calls,
            Parcels& parcels);
  // Close all connections, and make none any more; what the hooks need must live until then.
  void close() noexcept;

  bool is_connected(int peer) const {
    return states_[peer].load(std::memory_order_acquire) == kConnected;
  }
  bool has_failed(int peer) const { return states_[peer] == kFailed; }
  // Why there is no connection.
  std::string problem(int peer);
  // Begin to connect to `peer`, unless that was done.
  void reach(int peer);
  // Wait for it; false: not until `end`. Throws Failure where it cannot be had.
  bool await(int peer, Clock::time_point end);

  // Ask each of `peers` how many collectives of `group` it has begun; kSilent: it does not answer until `end`,
  // and kAbsent: nobody listens there.
  std::map<int, int64_t> calls_of(const std::vector<int>& peers, uint64_t group, Clock::time_point end);
  static constexpr int64_t kSilent = -1, kAbsent = -2;

  // In a forked child: close the descriptors.
  void abandon() const noexcept { descriptors_.close_all(); }

  // The connection with `peer`; null: there has been none.
  Pair* pair(int peer) const {
    return is_connected(peer) ? static_cast<Pair*>(pairs_[peer].get()) : nullptr;
  }

  // For a moment, read on this thread what arrives from `peer`, until `buffer` has received: Gloo's
  // thread, and then this one, need not be scheduled first.
  void read(gloo::transport::UnboundBuffer& buffer, int peer);

 private:
  enum State { kNone, kConnecting, kConnected, kFailed };
  class Listener;
  class Attempt;

  void begin(int peer, std::optional<uint64_t> asks_of = {});
  void accept();
  bool has_place(Attempt& attempt);
  void adopt(Attempt& attempt);
  void explain(int peer, const std::string& problem);
  void ended(Attempt& attempt, const std::string& problem, bool is_refused);
  void remove(int socket) const noexcept;
  void settle() const;

  const bool listens_on_;
  std::vector<char> address_;
  std::string addresses_;  // of all ranks, one after the other
  Prover prover_;
  Made made_;
  Pair::Told told_;
  Calls calls_;
  Parcels* parcels_ = nullptr;
  std::unique_ptr<Listener> listener_;
  const std::unique_ptr<Listener> settles_;  // of settle(), which may come when there are no descriptors left
  Descriptors descriptors_;
  double seconds_ = 0;
  Persistence reading_;
  std::unique_ptr<std::atomic<int>[]> states_;  // by peer; written under the lock

  std::mutex closing_;  // one thread closes, and others wait until it has
  std::mutex asking_;   // one thread asks at a time
  std::mutex lock_;  // of what follows
  std::condition_variable changed_;
  bool is_open_ = false;
  std::map<Attempt*, std::unique_ptr<Attempt>> attempts_;
  std::vector<std::string> problems_;  // by peer, why there is no connection
  std::map<int, int64_t> answers_;     // to calls_of
};

}  // namespace fl
