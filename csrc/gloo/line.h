// Sockets and time for the heartbeats. The simulation replaces line.cc.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include "../common/operation.h"
#include "descriptors.h"

namespace fl {

// Return the current time of the heartbeats.
Clock::time_point time_now();

// One connection. No function blocks.
class Line {
 public:
  // Take over an accepted connection, closed by the destructor.
  explicit Line(int socket);
  // Begin to connect to `address` (IPv4 or IPv6).
  explicit Line(const sockaddr_in6& address);
  ~Line();
  Line(Line&& other) noexcept;
  Line& operator=(Line&&) = delete;

  // Update the state of the connection and read arrived bytes.
  void update();
  bool is_connected() const { return is_connected_; }
  // True if the peer has closed the connection or does not listen. Its kernel answered, so its host is alive.
  bool has_left() const { return has_left_; }
  // True if has_left(), or if the connection is broken.
  bool has_ended() const { return has_left_ || is_broken_; }

  // Return the received bytes that were not taken yet, at most some kilobytes.
  const std::string& received() const { return received_; }
  std::string take(size_t bytes);
  // Send `bytes` and return the number of bytes that the kernel accepted.
  size_t send(const std::string& bytes);

  // Wake only if at least `bytes` bytes have arrived. The next update() reads fewer bytes as well.
  void await_at_least(int bytes);
  // Return the event to wait for.
  pollfd awaited() const;

  // Mark the connection as broken.
  void give_up() { is_broken_ = true; }
  // In a forked child: close the socket.
  void abandon() const noexcept { descriptor_.close_if_same(); }

 private:
  void fail(int error);

  int socket_;
  Descriptor descriptor_;
  bool is_connected_, has_left_ = false, is_broken_ = false;
  std::string received_;
};

// A listening socket.
class Listener {
 public:
  // Listen at `address_to_use` on a free port. Throws.
  explicit Listener(sockaddr_storage address_to_use);
  ~Listener();
  Listener(const Listener&) = delete;

  int port() const { return port_; }
  // Return a new connection, or nothing if no connection or no free descriptor is available.
  std::optional<Line> accept();

  // Wait for a new connection, an event of `lines`, `end`, or ring().
  void await(const std::vector<const Line*>& lines, Clock::time_point end);
  // From any thread: wake await(), now and in the future.
  void ring() noexcept;
  // In a forked child: close the socket. A later ring() in the child does not wake the parent.
  void abandon() const noexcept { descriptor_.close_if_same(); }

 private:
  int socket_ = -1, bell_ = -1, port_ = 0;
  bool has_room_ = true;  // false: descriptors ran out, and a connection may be pending
  Descriptor descriptor_;
};

void set_port(sockaddr_storage& address, int port);

// Make the kernel probe a peer that has been silent for `seconds`, and break the connection after another
// `seconds` without an answer. The kernel does not probe while data waits to be sent.
void keep_alive(int socket, double seconds) noexcept;

}  // namespace fl
