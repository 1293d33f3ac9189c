// One connection that carries heartbeats. Nothing here blocks.
#pragma once

#include <sys/socket.h>

#include <string>

#include "descriptors.h"

namespace fl {

class Line {
 public:
  // A connection that was accepted; it is closed with the line.
  explicit Line(int socket);
  // A connection to `address`, which is being made.
  explicit Line(const sockaddr_storage& address);
  ~Line();
  Line(Line&& other) noexcept;
  Line& operator=(Line&&) = delete;

  // Find out how it stands, and read what has come.
  void look();
  bool is_connected() const { return is_connected_; }
  // The other end has closed it, or nobody listens there: a kernel says so, hence that host is there.
  bool has_left() const { return has_left_; }
  bool is_broken() const { return is_broken_; }

  // What has come and was not taken, at most some kilobytes.
  const std::string& come() const { return come_; }
  std::string take(size_t bytes);
  // What does not fit into the kernel's memory breaks the line.
  void send(const std::string& bytes);

  // It is of no use.
  void give_up() { is_broken_ = true; }
  // In a forked child: close it.
  void abandon() const noexcept { known_.close_if_same(); }

 private:
  void fail(int error);

  int socket_;
  Descriptor known_;
  bool is_connected_, has_left_ = false, is_broken_ = false;
  std::string come_;
};

void set_port(sockaddr_storage& address, int port);

// Have the kernel ask the other end whether it is there when it has said nothing for `seconds`, and break
// the connection when that was in vain for as long again: after about twice `seconds`. It does not ask
// while something is to be sent.
void keep_alive(int socket, double seconds) noexcept;

}  // namespace fl
