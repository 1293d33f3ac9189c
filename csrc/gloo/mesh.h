// Connected sockets between all ranks of a group, on Gloo's unbound buffers, with waits that
// another thread can end and failures that name ranks.
#pragma once

#include <gloo/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../common/worker.h"
#include "abi.h"

namespace fl {

using Buffer = std::unique_ptr<gloo::transport::UnboundBuffer>;

// Slots keep messages of one kind apart from others on the same connection. Within a slot they
// arrive in the order they were sent, so one slot serves every operation in turn.
enum Slot : uint64_t {
  kHeaderSlot = 1,
  kControlSlot,
  kReduceSlot,
  kGatherSlot,
  kProbeSlot,
  kTagHeaderSlot = uint64_t{1} << 32,  // plus the tag, for the three below
  kTagReplySlot = uint64_t{2} << 32,
  kTagDataSlot = uint64_t{3} << 32,
};

class Mesh : public gloo::Context, public Transport {
 public:
  Mesh(int rank, int size, const std::string& host, const std::string& interface,
       double connect_seconds);
  ~Mesh() override;

  std::vector<char> address(int peer);
  // Throws Failure. `addresses` holds `size` addresses of `bytes` bytes each.
  void connect(const char* addresses, size_t bytes);

  // Wait for one send or receive of `buffer` with `peer` to finish. Throws Failure.
  void wait_recv(gloo::transport::UnboundBuffer& buffer, int peer);
  void wait_send(gloo::transport::UnboundBuffer& buffer, int peer);

  void begin(Clock::time_point deadline) override;
  void enforce_deadline() override;
  void stop() override;
  Failure explain(const std::string& what) override { return explain(-1, what); }
  void give_up(const Failure& failure) noexcept override;

 private:
  struct Control;
  template <typename Wait, typename Abort>
  void wait(Wait wait, Abort abort, int peer);
  // What a broken connection means: which ranks are lost, or why a peer gave up. `peer` is the one
  // that was waited for, or -1.
  Failure explain(int peer, const std::string& what);
  std::vector<int> broken_pairs();
  void post_control();

  std::mutex mutex_;
  void (*abort_)(gloo::transport::UnboundBuffer&) = nullptr;  // ends the running wait
  gloo::transport::UnboundBuffer* waiting_ = nullptr;
  Clock::time_point deadline_ = Clock::time_point::max();
  bool timed_out_ = false;
  bool stopped_ = false;
  bool connecting_ = false;

  std::vector<Control> control_;  // one per peer: why it gave up, when it has
  std::vector<Buffer> control_buffers_;
};

}  // namespace fl
