#include "line.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cstring>

namespace fl {
namespace {

constexpr size_t kMostWaiting = 16384;
constexpr int kProbes = 3, kMostIdle = 32767;  // kMostIdle: maximum seconds that the kernel accepts

// True if a system call that failed with `error` may succeed if it is repeated later.
bool is_later(int error) { return error == EAGAIN || error == EINTR || error == EINPROGRESS; }

void set(int socket, int level, int option, int value) {
  setsockopt(socket, level, option, &value, sizeof value);
}

socklen_t size_of(int family) {
  return family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
}

in_port_t& port_of(sockaddr_storage& address) {
  return address.ss_family == AF_INET ? reinterpret_cast<sockaddr_in&>(address).sin_port
                                      : reinterpret_cast<sockaddr_in6&>(address).sin6_port;
}

}  // namespace

Clock::time_point time_now() { return Clock::now(); }

Line::Line(int socket)
    : socket_(socket), descriptor_(Descriptor::of(socket)), is_connected_(true) {
  set(socket_, IPPROTO_TCP, TCP_NODELAY, 1);
}

Line::Line(const sockaddr_in6& address)
    : socket_(socket(address.sin6_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)),
      descriptor_(Descriptor::of(socket_)),
      is_connected_(false) {
  if (socket_ < 0) {
    fail(errno);
    return;
  }
  set(socket_, IPPROTO_TCP, TCP_NODELAY, 1);
  const auto* target = reinterpret_cast<const sockaddr*>(&address);
  if (connect(socket_, target, size_of(address.sin6_family)) != 0) fail(errno);
}

Line::~Line() {
  if (socket_ >= 0) close(socket_);
}

Line::Line(Line&& other) noexcept
    : socket_(std::exchange(other.socket_, -1)),
      descriptor_(other.descriptor_),
      is_connected_(other.is_connected_),
      has_left_(other.has_left_),
      is_broken_(other.is_broken_),
      received_(std::move(other.received_)) {}

void Line::fail(int error) {
  if (is_later(error)) return;
  (error == ECONNREFUSED || error == ECONNRESET || error == EPIPE ? has_left_ : is_broken_) = true;
}

void Line::update() {
  if (has_left_ || is_broken_) return;
  if (!is_connected_) {
    pollfd socket_number{socket_, POLLOUT, 0};
    if (poll(&socket_number, 1, 0) != 1) return;
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(socket_, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return fail(error);
    is_connected_ = true;
  }
  char room[1024];
  while (received_.size() < kMostWaiting) {
    const ssize_t count = recv(socket_, room, sizeof room, 0);
    if (count < 0) return fail(errno);
    if (count == 0) {
      has_left_ = true;
      return;
    }
    received_.append(room, count);
  }
}

std::string Line::take(size_t bytes) {
  std::string taken = received_.substr(0, bytes);
  received_.erase(0, bytes);
  return taken;
}

size_t Line::send(const std::string& bytes) {
  if (has_left_ || is_broken_) return 0;
  const ssize_t count = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  if (count < 0) fail(errno);
  return std::max<ssize_t>(count, 0);
}

void Line::await_at_least(int bytes) { set(socket_, SOL_SOCKET, SO_RCVLOWAT, bytes); }

pollfd Line::awaited() const {
  return {socket_, static_cast<short>(is_connected_ ? POLLIN : POLLOUT), 0};
}

Listener::Listener(sockaddr_storage address_to_use) {
  set_port(address_to_use, 0);
  const auto address = reinterpret_cast<sockaddr*>(&address_to_use);
  socklen_t size = size_of(address_to_use.ss_family);
  socket_ = socket(address_to_use.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  bell_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  const bool listens = bell_ >= 0 && socket_ >= 0 && bind(socket_, address, size) == 0 &&
                       listen(socket_, SOMAXCONN) == 0 &&
                       getsockname(socket_, address, &size) == 0;
  if (!listens) {
    const std::string reason = std::strerror(errno);
    for (int descriptor : {socket_, bell_}) {
      if (descriptor >= 0) close(descriptor);
    }
    throw std::runtime_error("cannot listen for heartbeats: " + reason);
  }
  descriptor_ = Descriptor::of(socket_);
  port_ = ntohs(port_of(address_to_use));
}

Listener::~Listener() {
  close(socket_);
  close(bell_);
}

std::optional<Line> Listener::accept() {
  const int socket_number = accept4(socket_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  has_room_ = socket_number >= 0 || is_later(errno);
  return socket_number < 0 ? std::nullopt : std::make_optional<Line>(socket_number);
}

// If descriptors ran out, do not poll the listener, because a pending connection would end every poll.
void Listener::await(const std::vector<const Line*>& lines, Clock::time_point end) {
  std::vector<pollfd> events{{bell_, POLLIN, 0}, {has_room_ ? socket_ : -1, POLLIN, 0}};
  for (const Line* line : lines) events.push_back(line->awaited());
  const auto remaining = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now()).count();
  poll(events.data(), events.size(), static_cast<int>(std::clamp<int64_t>(remaining, 0, 1000)));
}

void Listener::ring() noexcept { eventfd_write(bell_, 1); }

void set_port(sockaddr_storage& address, int port) { port_of(address) = htons(static_cast<uint16_t>(port)); }

void keep_alive(int socket, double seconds) noexcept {
  const int idle = static_cast<int>(seconds);
  // TCP_USER_TIMEOUT is not set: it would break the connection to a rank in a debugger, which receives no
  // data although its host answers. Only rendezvous connections use it, because nothing else monitors them.
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, std::clamp(idle, 1, kMostIdle));
  const int interval = (idle + kProbes - 1) / kProbes;
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, std::clamp(interval, 1, kMostIdle));
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
}

}  // namespace fl
