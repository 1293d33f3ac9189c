// What heartbeats need of the system: connections, where others connect to, and the time. A simulation has a
// line.cc of its own.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include "../common/operation.h"
#include "descriptors.h"

namespace fl {

// What the time is for them.
Clock::time_point time_now();

// One connection. Nothing here blocks.
class Line {
 public:
  // A connection that was accepted; it is closed with the line.
  explicit Line(int socket);
  // A connection to `address`, of IPv4 too, which is being made.
  explicit Line(const sockaddr_in6& address);
  ~Line();
  Line(Line&& other) noexcept;
  Line& operator=(Line&&) = delete;

  // Find out how it stands, and read what has come.
  void look();
  bool is_connected() const { return is_connected_; }
  // The other end has closed it, or nobody listens there: a kernel says so, hence that host is there.
  bool has_left() const { return has_left_; }
  // So it has, or it is of no use.
  bool has_ended() const { return has_left_ || is_broken_; }

  // What has come and was not taken, at most some kilobytes.
  const std::string& come() const { return come_; }
  std::string take(size_t bytes);
  // How many bytes the kernel has taken.
  size_t send(const std::string& bytes);

  // From now on less than `bytes` bytes are no event: they are there at the next look.
  void await_at_least(int bytes);
  // The event that it waits for.
  pollfd awaited() const;

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

// Where others connect to.
class Listener {
 public:
  // At `here`, at a port of its own. Throws.
  explicit Listener(sockaddr_storage here);
  ~Listener();
  Listener(const Listener&) = delete;

  int port() const { return port_; }
  // Who has come; none: nobody, or there is no room.
  std::optional<Line> accept();

  // Wait until somebody comes, one of `lines` has an event, it is `end`, or it was rung.
  void await(const std::vector<const Line*>& lines, Clock::time_point end);
  // From any thread; for good.
  void ring() noexcept;
  // In a forked child: close it. What is rung harms nobody there.
  void abandon() const noexcept { known_.close_if_same(); }

 private:
  int socket_ = -1, bell_ = -1, port_ = 0;
  bool has_room_ = true;  // nobody was left waiting for want of a descriptor
  Descriptor known_;
};

void set_port(sockaddr_storage& address, int port);

// Have the kernel ask the other end whether it is there when it has said nothing for `seconds`, and break
// the connection when that was in vain for as long again: after about twice `seconds`. It does not ask
// while something is to be sent.
void keep_alive(int socket, double seconds) noexcept;

}  // namespace fl
