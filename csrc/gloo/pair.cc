#include "pair.h"

#include <gloo/transport/tcp/loop.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace fl {

namespace tcp = gloo::transport::tcp;

namespace {

// Private members are named in explicit instantiations, where access is not checked: a Gloo that
// has others does not compile.
template <typename Of, typename Of::Member member>
struct Reveal {
  friend typename Of::Member reveal(Of) { return member; }
};

struct DeviceLoop {
  using Member = std::shared_ptr<tcp::Loop> tcp::Device::*;
  friend Member reveal(DeviceLoop);
};
struct LoopDescriptor {
  using Member = int tcp::Loop::*;
  friend Member reveal(LoopDescriptor);
};
struct DeviceAttributes {
  using Member = const tcp::attr tcp::Device::*;
  friend Member reveal(DeviceAttributes);
};

template struct Reveal<DeviceLoop, &tcp::Device::loop_>;
template struct Reveal<LoopDescriptor, &tcp::Loop::fd_>;
template struct Reveal<DeviceAttributes, &tcp::Device::attr_>;

}  // namespace

int descriptor_of(const tcp::Device& device) {
  return (*(device.*reveal(DeviceLoop{}))).*reveal(LoopDescriptor{});
}

const tcp::attr& attributes_of(const tcp::Device& device) {
  return device.*reveal(DeviceAttributes{});
}

// It is made to listen, at an address that no rank knows.
Pair::Pair(tcp::Context* context, tcp::Device* device, int peer, int socket)
    : tcp::Pair(context, device, peer, std::chrono::hours(24)) {
  const std::lock_guard<std::mutex> lock(m_);
  if (state_ != LISTENING) throw std::runtime_error("a stranger has connected");
  epoll_ctl(descriptor_of(*device), EPOLL_CTL_DEL, fd_, nullptr);
  ::close(fd_);
  fd_ = socket;
  try {
    handleConnected();
  } catch (const std::exception&) {
    state_ = CLOSED;  // with nothing to close: Gloo's loop does not serve it
    throw;
  }
}

void Pair::is_served(bool served) {
  const std::lock_guard<std::mutex> lock(m_);
  if (state_ != CONNECTED) return;
  const unsigned reads = served ? EPOLLIN : 0u, writes = tx_.empty() ? 0u : EPOLLOUT;
  device_->registerDescriptor(fd_, static_cast<int>(reads | writes), this);
}

void Pair::read_what_has_arrived() {
  const std::lock_guard<std::mutex> lock(m_);
  if (state_ == CONNECTED) handleReadWrite(EPOLLIN);
}

bool Pair::has_delivered(std::chrono::milliseconds silence) {
  const std::lock_guard<std::mutex> lock(m_);
  int unacknowledged = 0;
  tcp_info info{};
  socklen_t size = sizeof info;
  if (state_ != CONNECTED || ioctl(fd_, SIOCOUTQ, &unacknowledged) != 0 || unacknowledged == 0) return true;
  getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &size);
  return std::chrono::milliseconds(info.tcpi_last_ack_recv) >= silence;
}

void Pair::changeState(state next) noexcept {
  if (next == CLOSED && state_ == CONNECTED) ended_at_ = Clock::now();
  tcp::Pair::changeState(next);
}

Packet::Packet(Pair* pair) : pair_(pair) {
  if (pair_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(pair_->m_);
  ++pair_->packets_;
}

// To set the option again sends what the kernel holds back.
Packet::~Packet() {
  if (pair_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(pair_->m_);
  if (--pair_->packets_ > 0 || !pair_->is_held_) return;
  pair_->is_held_ = false;
  const int on = 1;
  if (pair_->state_ != Pair::CONNECTED) return;
  setsockopt(pair_->fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

void Pair::send(gloo::transport::UnboundBuffer* buffer, uint64_t slot, size_t offset, size_t bytes) {
  const Packet packet(this);
  tcp::Pair::send(buffer, slot, offset, bytes);
}

bool Pair::write(tcp::Op& op) {
  const auto code = op.getOpcode();
  const bool notifies = code == tcp::Op::NOTIFY_RECV_READY || code == tcp::Op::NOTIFY_SEND_READY;
  if (packets_ > 0 && notifies && op.nwritten == 0) {
    const ssize_t sent =
        ::send(fd_, &op.preamble, sizeof op.preamble, MSG_MORE | MSG_NOSIGNAL | MSG_DONTWAIT);
    op.nwritten = std::max<ssize_t>(sent, 0);
    is_held_ = true;
    if (op.nwritten == sizeof op.preamble) return true;
  }
  const bool all = tcp::Pair::write(op);
  if (!notifies) is_held_ = false;
  return all;
}

bool Receiver::has_received() {
  const std::lock_guard<std::mutex> lock(m_);
  return recvCompletions_ > 0;
}

int Receiver::sent() {
  const std::lock_guard<std::mutex> lock(m_);
  return sendCompletions_;
}

}  // namespace fl
