// Sockets and time for the heartbeats. tests/simulation replaces line.cc.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include "../common/operation.h"
#include "descriptors.h"

namespace fl {

Clock::time_point time_now();

// One connection. No function blocks.
class Line {
 public:
  // Use the accepted connection `socket`. The destructor closes it.
  explicit Line(int socket);
  // Begin to connect to `address` (IPv4 or IPv6).
  explicit Line(const sockaddr_in6& address);
  ~Line();
  Line(Line&& other) noexcept;
  Line& operator=(Line&&) = delete;

  // Update the state of the connection and read arrived bytes.
  void update();
  bool is_connected() const { return is_connected_; }
  // True if the peer has closed the connection or does not listen. In both cases its host has answered.
  bool has_left() const { return has_left_; }
  bool has_ended() const { return has_left_ || is_broken_; }

  // Return the received bytes that take() has not removed, at most some kilobytes.
  const std::string& received() const { return received_; }
  std::string take(size_t bytes);
  // Send `bytes`. Return the number of bytes that the kernel has accepted, which may be less.
  size_t send(const std::string& bytes);

  // Let Listener::await() wake for this connection only if at least `bytes` bytes have arrived.
  void await_at_least(int bytes);
  // Return the event for which Listener::await() polls this connection.
  pollfd awaited() const;

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
  // Listen at `address_to_use` on a free port. Throws std::runtime_error.
  explicit Listener(sockaddr_storage address_to_use);
  ~Listener();
  Listener(const Listener&) = delete;

  int port() const { return port_; }
  // Return a new connection, or no value if none is pending or descriptors ran out.
  std::optional<Line> accept();

  // Wait until a connection is pending, a line has an event, ring() is called, or `end` is reached.
  void await(const std::vector<const Line*>& lines, Clock::time_point end);
  // From any thread: end a running await(), and let later calls of await() return immediately.
  void ring() noexcept;
  // In a forked child: close the socket. After that, ring() in the child cannot wake the parent.
  void abandon() const noexcept { descriptor_.close_if_same(); }

 private:
  int socket_ = -1, bell_ = -1, port_ = 0;
  bool has_room_ = true;  // false if the last accept() found no free descriptor
  Descriptor descriptor_;
};

void set_port(sockaddr_storage& address, int port);

// Let the kernel probe a peer that is silent for `seconds`, and break the connection if the peer does not
// answer for another `seconds`. The kernel sends no probes while data waits to be sent.
void keep_alive(int socket, double seconds) noexcept;

}  // namespace fl
