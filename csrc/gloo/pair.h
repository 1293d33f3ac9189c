// A connection of Gloo's, with what Gloo has no name for.
#pragma once

#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/pair.h>
#include <gloo/transport/tcp/unbound_buffer.h>

#include <atomic>
#include <chrono>

#include "../common/operation.h"

namespace fl {

// Sockets are found by their addresses and the epoll by a private member, as Gloo exposes no
// descriptor, and leaves them open on exec and in forked children, where they would hide that a
// rank was killed.
// Of Gloo's thread that serves the sockets: its epoll descriptor.
int descriptor_of(const gloo::transport::tcp::Device& device);
const gloo::transport::tcp::attr& attributes_of(const gloo::transport::tcp::Device& device);

class Pair : public gloo::transport::tcp::Pair {
 public:
  // With a socket that is connected; throws, and leaves it alone, where the other end has gone.
  Pair(gloo::transport::tcp::Context* context, gloo::transport::tcp::Device* device, int peer,
       int socket);

  // Whether Gloo's thread reads what arrives; it does from the beginning.
  void is_served(bool served);
  // Read what has arrived, on this thread.
  void read_what_has_arrived();
  // What says how long the message is goes with it.
  void send(gloo::transport::UnboundBuffer* buffer, uint64_t slot, size_t offset,
            size_t bytes) override;
  using gloo::transport::tcp::Pair::send;

  // When the connection ended; kNever: it has not.
  Clock::time_point ended_at() const { return ended_at_; }
  // Whether the peer's kernel has all that was sent, or has said nothing for as long as `silence`. What it
  // has, the peer gets, also where this end closes now.
  bool has_delivered(std::chrono::milliseconds silence);

 private:
  friend class Packet;
  bool write(gloo::transport::tcp::Op& op) override;
  void changeState(state next) noexcept override;

  std::atomic<Clock::time_point> ended_at_{kNever};

  // Under its mutex, like all else: how many packets have begun, and whether the kernel holds one back.
  int packets_ = 0;
  bool is_held_ = false;
};

// While it lives, what notifies the peer of messages goes in one packet with what is sent to it next.
class Packet {
 public:
  explicit Packet(Pair* pair);  // null: there is no connection yet
  ~Packet();
  Packet(const Packet&) = delete;
  Packet& operator=(const Packet&) = delete;

 private:
  Pair* const pair_;
};

// What all buffers of Links are.
class Receiver : public gloo::transport::tcp::UnboundBuffer {
 public:
  using UnboundBuffer::UnboundBuffer;

  // Whether a wait for the next message would return at once.
  bool has_received();
  // How many sends have ended that nobody has waited for.
  int sent();
};

}  // namespace fl
