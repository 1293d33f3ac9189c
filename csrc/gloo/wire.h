// Transport of records over the connections of a Family.
#pragma once

#include "../common/engine.h"
#include "../common/futex.h"
#include "links.h"

namespace fl {

// The thread that reads a connection stores the parcels until the engine takes them.
class GlooWire final : public Wire, public Parcels {
 public:
  explicit GlooWire(Links& links);

  size_t eager_bytes() const override { return 64 << 10; }
  Room reserve(int peer, size_t bytes) override;
  void send(int peer, const Room& room) override;
  bool has_sent(int peer) override;
  Room next(int peer) override;
  void drop(int peer) override;
  std::unique_ptr<Flow> flow(const Moves& moves) override;
  void begin_polling(int peer) override;
  void end_polling(int peer, bool in_vain) override;
  void rest(int peer, int polls) override;
  uint32_t begin_wait() override { return futex_.begin_wait(); }
  void wait(uint32_t since, bool as_caller, long milliseconds) override {
    ++Pair::sleepers;
    futex_.wait(since, as_caller ? kCallers : kThread, milliseconds);
    --Pair::sleepers;
  }
  void end_wait() override { futex_.end_wait(); }
  void wake(bool callers) override { futex_.wake(callers ? kCallers : kThread); }
  void wake_all() noexcept { futex_.wake(kCallers | kThread); }

  void received(int peer, uint64_t group, bool is_over, Parcel parcel) override;
  void sent(int peer, size_t bytes) override;
  void ended(int) noexcept override { wake_all(); }

  // Maximum number of polls before a thread waits for Gloo's thread. A polling thread reads the connections
  // itself. This saves the wake-ups of Gloo's thread and of the polling thread.
  static constexpr int kPolls = 240;

 private:
  static constexpr uint32_t kCallers = 1, kThread = 2;
  class Stream;
  struct StoredParcel {
    uint64_t group;
    Parcel parcel;
  };
  struct PeerState {
    std::mutex mutex;                 // guards `parcels`
    std::list<StoredParcel> parcels;  // not a deque, which uses memory even if it is empty
    std::atomic<size_t> count{0};
    std::atomic<size_t> waits{0};  // bytes waiting to be sent
    std::optional<Parcel> reserved;
    std::atomic<int> pollers{0};
  };

  template <typename Visit>
  void for_each(int peer, Visit visit);

  void parcels(int peer, StoredParcel parcel);

  Links& links_;
  Futex futex_;
  const std::unique_ptr<PeerState[]> peer_states_;  // by rank
};

}  // namespace fl
