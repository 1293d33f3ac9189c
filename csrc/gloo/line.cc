#include "line.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace fl {
namespace {

constexpr size_t kMostWaiting = 16384;
constexpr int kProbes = 3, kMostIdle = 32767;  // more seconds the kernel refuses

// Nothing is wrong, it only cannot be done now.
bool is_later(int error) { return error == EAGAIN || error == EINTR || error == EINPROGRESS; }

void set(int socket, int level, int option, int value) {
  setsockopt(socket, level, option, &value, sizeof value);
}

}  // namespace

Line::Line(int socket)
    : socket_(socket), known_(Descriptor::of(socket)), is_connected_(true) {
  set(socket_, IPPROTO_TCP, TCP_NODELAY, 1);
}

Line::Line(const sockaddr_storage& address)
    : socket_(socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)),
      known_(Descriptor::of(socket_)),
      is_connected_(false) {
  if (socket_ < 0) {
    fail(errno);
    return;
  }
  set(socket_, IPPROTO_TCP, TCP_NODELAY, 1);
  const socklen_t size = address.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  if (connect(socket_, reinterpret_cast<const sockaddr*>(&address), size) != 0) fail(errno);
}

Line::~Line() {
  if (socket_ >= 0) close(socket_);
}

Line::Line(Line&& other) noexcept
    : socket_(std::exchange(other.socket_, -1)),
      known_(other.known_),
      is_connected_(other.is_connected_),
      has_left_(other.has_left_),
      is_broken_(other.is_broken_),
      come_(std::move(other.come_)) {}

void Line::fail(int error) {
  if (is_later(error)) return;
  (error == ECONNREFUSED || error == ECONNRESET || error == EPIPE ? has_left_ : is_broken_) = true;
}

void Line::look() {
  if (has_left_ || is_broken_) return;
  if (!is_connected_) {
    pollfd made{socket_, POLLOUT, 0};
    if (poll(&made, 1, 0) != 1) return;
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(socket_, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return fail(error);
    is_connected_ = true;
  }
  char room[1024];
  while (come_.size() < kMostWaiting) {
    const ssize_t count = recv(socket_, room, sizeof room, 0);
    if (count < 0) return fail(errno);
    if (count == 0) {
      has_left_ = true;
      return;
    }
    come_.append(room, count);
  }
}

std::string Line::take(size_t bytes) {
  std::string taken = come_.substr(0, bytes);
  come_.erase(0, bytes);
  return taken;
}

void Line::send(const std::string& bytes) {
  if (has_left_ || is_broken_) return;
  const ssize_t count = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  if (count < 0 && !is_later(errno)) return fail(errno);
  if (count != static_cast<ssize_t>(bytes.size())) is_broken_ = true;
}

void set_port(sockaddr_storage& address, int port) {
  auto& in_place = address.ss_family == AF_INET
                       ? reinterpret_cast<sockaddr_in&>(address).sin_port
                       : reinterpret_cast<sockaddr_in6&>(address).sin6_port;
  in_place = htons(static_cast<uint16_t>(port));
}

void keep_alive(int socket, double seconds) noexcept {
  const int idle = static_cast<int>(seconds);
  // No TCP_USER_TIMEOUT: the kernel counts the time of a full window too, also while the other
  // end answers, so a rank in a debugger would be lost. Connections of the rendezvous have it, as
  // nobody else watches over them.
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, std::clamp(idle, 1, kMostIdle));
  const int interval = (idle + kProbes - 1) / kProbes;
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, std::clamp(interval, 1, kMostIdle));
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
}

}  // namespace fl
