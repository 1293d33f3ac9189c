#include "pair.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstring>

#include "descriptors.h"

namespace fl {

namespace tcp = gloo::transport::tcp;

namespace {

// Explicit instantiations skip access checks: this struct gives access to private members of Gloo's classes.
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

std::shared_ptr<Device> create_device(const std::string& host, const std::string& interface) {
  tcp::attr attributes;
  attributes.hostname = host;
  attributes.iface = interface;
  return std::dynamic_pointer_cast<Device>(tcp::CreateDevice(attributes));
}

int descriptor_of(const Device& device) {
  return (*(device.*reveal(DeviceLoop{}))).*reveal(LoopDescriptor{});
}

int listening_socket(const Device& device) {
  const tcp::attr& device_attributes = device.*reveal(DeviceAttributes{});
  const int descriptor = socket(device_attributes.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (descriptor < 0) fail_in("socket");
  const auto* address = reinterpret_cast<const sockaddr*>(&device_attributes.ai_addr);
  const bool is_bound = bind(descriptor, address, device_attributes.ai_addrlen) == 0;
  if (is_bound && listen(descriptor, SOMAXCONN) == 0) return descriptor;
  const int error = errno;
  ::close(descriptor);
  errno = error;
  fail_in(is_bound ? "listen" : "bind");
}

std::vector<char> address_of(int socket) { return tcp::Address::fromSockName(socket).bytes(); }

sockaddr_storage read_address(const char* address, size_t bytes) {
  return tcp::Address(std::vector<char>(address, address + bytes)).getSockaddr();
}

namespace {

// Opcodes of notes, parcels and packets of call(). Gloo has no such messages.
constexpr size_t kNote = 16, kParcel = 17, kCall = 18;
constexpr size_t kMostInParcel = 1 << 24;
constexpr size_t kSend = tcp::Op::SEND_UNBOUND_BUFFER, kReady = tcp::Op::NOTIFY_RECV_READY;

constexpr size_t kHead = sizeof(tcp::Op::preamble);
constexpr size_t kDiscardBytes = 64 << 10;
constexpr size_t kBeyondBytes = 32 << 10;
constexpr size_t kMostHeld = 16 << 10;  // maximum bytes of delayed packets
constexpr std::chrono::microseconds kGap{20};  // packets that follow sooner are sent together

// True if a write cannot be repeated after `error`. If the peer has closed the connection, read() reports this
// after it has read the peer's last data.
bool is_fatal(int error) {
  return error != EAGAIN && error != EINTR && error != ECONNRESET && error != EPIPE;
}

// Base class of OwnedBuffer: it is initialised before Buffer, which needs the address of the parcel.
struct Memory {
  Parcel parcel;
};

Parcel copied(const char* bytes, size_t size) {
  Parcel parcel(size);
  std::copy_n(bytes, size, parcel.memory.get());
  return parcel;
}

}  // namespace

class Pair::OwnedBuffer : private Memory, public Buffer {
 public:
  explicit OwnedBuffer(Parcel contents)
      : Memory{std::move(contents)}, Buffer(nullptr, parcel.memory.get(), parcel.bytes) {}

  Weak weak() const { return getWeakNonOwningPtr(); }
};

// Gloo's constructor opens a socket for listening. Close it and use the connected `socket` instead.
Pair::Pair(Context* context, Device* device, int peer, int socket, NoteHandler note_handler, Parcels& parcels,
           std::function<void()> alarm)
    : tcp::Pair(context, device, peer, std::chrono::hours(24)),
      note_handler_(std::move(note_handler)),
      parcels_(parcels),
      alarm_(std::move(alarm)) {
  const std::lock_guard<std::mutex> lock(m_);
  if (state_ != LISTENING) throw std::runtime_error("an unknown process has connected");
  epoll_ctl(descriptor_of(*device), EPOLL_CTL_DEL, fd_, nullptr);
  ::close(fd_);
  fd_ = socket;
  try {
    handleConnected();
  } catch (const std::exception&) {
    state_ = CLOSED;  // Gloo's loop does not serve this socket
    throw;
  }
}

Pair::~Pair() = default;

void Pair::set_served(bool served) {
  const std::lock_guard<std::mutex> lock(m_);
  was_polled_ |= !served;
  serve(served);
}

void Pair::serve(bool served) {
  if (state_ != CONNECTED || is_served_ == served) return;
  is_served_ = served;
  if (!served) alarm_();
  epoll_event event{};
  event.events = (served ? EPOLLIN : 0u) | (tx_.empty() ? 0u : EPOLLOUT);
  event.data.ptr = static_cast<Handler*>(this);
  epoll_ctl(descriptor_of(*device_), EPOLL_CTL_MOD, fd_, &event);  // Gloo's function would use ADD
}

// Do not wait for the lock: its owner may wait for Gloo's thread.
bool Pair::settle() {
  const std::unique_lock<std::mutex> lock(m_, std::try_to_lock);
  if (!lock) return true;
  const bool is_polled = std::exchange(was_polled_, false);
  if (!is_polled) serve(true);
  return !send_held() || is_polled;
}

// If another thread has the lock, return, because it may wait for Gloo's thread. The event will occur again.
void Pair::handleEvents(int events) {
  if (!m_.try_lock()) return void(sched_yield());
  m_.unlock();
  tcp::Pair::handleEvents(events);
}

void Pair::read_available() {
  const std::lock_guard<std::mutex> lock(m_);
  if (state_ == CONNECTED) handleReadWrite(EPOLLIN);
}

int Pair::socket() {
  const std::lock_guard<std::mutex> lock(m_);
  return fd_;
}

bool Pair::has_delivered(std::chrono::milliseconds silence) {
  const std::lock_guard<std::mutex> lock(m_);
  if (state_ != CONNECTED) return true;
  int unacknowledged = 0;
  tcp_info info{};
  socklen_t size = sizeof info;
  const bool is_known = ioctl(fd_, SIOCOUTQ, &unacknowledged) == 0;
  if (tx_.empty() && (!is_known || unacknowledged == 0)) return true;
  getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &size);
  return std::chrono::milliseconds(info.tcpi_last_ack_recv) >= silence;
}

std::string Pair::problem() {
  const std::lock_guard<std::mutex> lock(m_);
  try {
    throwIfException();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "the connection was closed";
}

// Sending ---------------------------------------------------------------------------------

void Pair::send(Receiver& buffer, uint64_t group, uint64_t slot, size_t offset, size_t bytes) {
  const std::lock_guard<std::mutex> lock(m_);
  require_connected();
  Queues& slots = group_states_[group].slots;
  SlotQueues& line = slots[slot];
  const Part part{buffer.getWeakNonOwningPtr(), offset, bytes};
  buffer.begin(*this);
  if (line.ready == 0) return line.sends.push_back(part);
  --line.ready;
  erase_if_idle(slots, slot);
  put(kSend, group, slot, part);
}

void Pair::call(uint64_t group, uint64_t tag, std::initializer_list<iovec> parts, Haste haste) {
  const std::lock_guard<std::mutex> lock(m_);
  require_connected();
  size_t bytes = 0;
  for (const iovec& part : parts) bytes += part.iov_len;
  if (haste == kSoon && Clock::now() - called_at_ > kGap) haste = kNow;
  if (haste == kNow) called_at_ = Clock::now();
  was_polled_ |= sleepers == 0;  // this rank reads the connection in its next wait
  if (!tx_.empty() || held_.size() + kHead + bytes > kMostHeld) {
    Parcel parcel(bytes);
    char* end = parcel.memory.get();
    for (const iovec& part : parts) end = std::copy_n(static_cast<const char*>(part.iov_base), part.iov_len, end);
    owned_.emplace_back(std::move(parcel));
    return put(kCall, group, tag, {owned_.back().weak(), 0, bytes});
  }
  const decltype(tcp::Op::preamble) head{kHead + bytes, kCall, tag, 0, bytes, group};
  held_.append(reinterpret_cast<const char*>(&head), kHead);
  for (const iovec& part : parts) held_.append(static_cast<const char*>(part.iov_base), part.iov_len);
  held_haste_ = std::max(held_haste_, haste);
  if (haste != kNow || !send_held()) alarm_();
}

bool Pair::hurry(Haste haste) {
  const std::lock_guard<std::mutex> lock(m_);
  return held_haste_ >= haste ? send_held() : held_.empty() && tx_.empty();
}

// If the kernel does not accept all delayed packets, a later write or alarm sends the rest.
bool Pair::send_held() {
  if (state_ != CONNECTED) return true;
  const ssize_t sent = held_.empty() ? 0 : ::send(fd_, held_.data(), held_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  held_.erase(0, std::max<ssize_t>(sent, 0));
  if (sent < 0 && is_fatal(errno)) fail("write", errno);
  if (held_.empty()) held_haste_ = kLater;
  return held_.empty() && tx_.empty();
}

void Pair::listen(Receiver& buffer, uint64_t group) {
  const std::lock_guard<std::mutex> lock(m_);
  buffer.begin(*this);
  GroupState& group_state = group_states_[group];
  group_state.listener = buffer.getWeakNonOwningPtr();
  for (size_t i = 0; i < group_state.calls.size(); ++i) count(group_state.listener, rank_);
}

void Pair::count(const Weak& weak, int peer) {
  const Alive buffer(weak);
  if (buffer) static_cast<Receiver*>(buffer.operator->())->handleRecvCompletion(peer);
}

void Pair::take_calls(uint64_t group, std::vector<ArrivedCall>& calls) {
  const std::lock_guard<std::mutex> lock(m_);
  const auto group_state = group_states_.find(group);
  if (group_state == group_states_.end()) return;
  calls.swap(group_state->second.calls);
  const Alive listener(group_state->second.listener);
  if (listener && !calls.empty()) static_cast<Receiver*>(listener.operator->())->forget_received();
}

void Pair::receive(Receiver& buffer, uint64_t group, uint64_t slot, size_t offset, size_t bytes) {
  const std::lock_guard<std::mutex> lock(m_);
  require_connected();
  buffer.begin(*this);
  group_states_[group].slots[slot].receives.push_back({buffer.getWeakNonOwningPtr(), offset, bytes});
  put(kReady, group, slot, {});
}

void Pair::send_note(uint64_t group, const std::string& text, bool is_last) {
  const std::lock_guard<std::mutex> lock(m_);
  require_connected();
  owned_.emplace_back(copied(text.data(), text.size()));
  put(kNote, group, is_last ? 1 : 0, {owned_.back().weak(), 0, text.size()});
  if (!is_last) return;
  GroupState& group_state = group_states_[group];
  group_state.slots.clear();
  group_state.calls.clear();
  group_state.is_over_here = true;
  if (group_state.is_over_there) group_states_.erase(group);
}

void Pair::post(uint64_t group, Parcel parcel) {
  const std::lock_guard<std::mutex> lock(m_);
  require_connected();
  const size_t bytes = parcel.bytes;
  owned_.emplace_back(std::move(parcel));
  put(kParcel, group, 0, {owned_.back().weak(), 0, bytes});
}

void Pair::require_connected() {
  throwIfException();
  if (state_ != CONNECTED) throw std::runtime_error("the connection was closed");
}

void Pair::put(size_t code, uint64_t group, uint64_t slot, const Part& part) {
  tcp::Op op;
  op.preamble.nbytes = kHead + part.bytes;
  op.preamble.opcode = code;
  op.preamble.slot = slot;
  op.preamble.length = part.bytes;
  op.preamble.roffset = group;
  op.ubuf = part.buffer;
  op.offset = part.offset;
  op.nbytes = part.bytes;
  sendAsyncMode(op);
}

void Pair::erase_if_idle(Queues& slots, uint64_t slot) {
  const auto line = slots.find(slot);
  const SlotQueues& queues = line->second;
  if (queues.ready == 0 && queues.sends.empty() && queues.receives.empty()) slots.erase(line);
}

// If a message is partly sent, its remaining bytes are copied and sent later, because the peer expects them.
void Pair::forget(const Receiver& buffer, uint64_t group) {
  const std::lock_guard<std::mutex> lock(m_);
  const auto is_buffer = [&](const Weak& weak) { return Alive(weak).operator->() == &buffer; };
  const auto forget = [&](Weak& weak) {
    if (is_buffer(weak)) weak = {};
  };
  forget(rx_.ubuf);
  const auto group_state = group_states_.find(group);
  if (group_state != group_states_.end()) {
    forget(group_state->second.listener);
    for (auto& [slot, line] : group_state->second.slots) {
      line.sends.remove_if([&](const Part& part) { return is_buffer(part.buffer); });
      for (Part& part : line.receives) forget(part.buffer);
    }
  }
  for (tcp::Op& op : tx_) {
    if (!is_buffer(op.ubuf)) continue;
    op.ubuf = {};
    if (op.nwritten == 0) continue;
    const size_t sent = std::max(op.nwritten, kHead) - kHead;
    owned_.emplace_back(copied(static_cast<const char*>(buffer.ptr) + op.offset + sent, op.nbytes - sent));
    op.ubuf = owned_.back().weak();
    op.offset = -sent;  // the copy begins at the first unsent byte
  }
}

// Send the rest of `op`, and return true if it is done. It is also done if its buffer no longer exists.
bool Pair::write(tcp::Op& op) {
  if (state_ == CLOSED) return false;
  const bool notifies = op.preamble.opcode == kReady;
  Alive buffer;
  if (!notifies && !(buffer = Alive(op.ubuf))) return true;
  while (op.nwritten < op.preamble.nbytes) {
    const size_t sent = std::max(op.nwritten, kHead) - kHead;
    iovec rooms[3] = {{held_.data(), held_.size()}};
    msghdr message{};
    message.msg_iov = rooms;
    message.msg_iovlen = 1;
    if (op.nwritten < kHead) {
      rooms[message.msg_iovlen++] = {reinterpret_cast<char*>(&op.preamble) + op.nwritten, kHead - op.nwritten};
    }
    if (op.nbytes > sent) {
      rooms[message.msg_iovlen++] = {static_cast<char*>(buffer->ptr) + (op.offset + sent), op.nbytes - sent};
    }
    const ssize_t count = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count >= 0) {
      const size_t held = std::min<size_t>(count, held_.size());
      held_.erase(0, held);
      op.nwritten += count - held;
    } else if (errno != EINTR) {
      const int error = errno;
      buffer = Alive();  // release it: fail() may destroy the buffer
      if (is_fatal(error)) fail("write", error);
      return false;
    }
  }
  if (notifies) return true;
  Buffer* const sent = buffer.operator->();
  const auto owned = std::find_if(owned_.begin(), owned_.end(), [&](OwnedBuffer& entry) { return &entry == sent; });
  if (owned != owned_.end()) {
    buffer = Alive();  // release it: erase() destroys the buffer
    owned_.erase(owned);
    if (op.preamble.opcode == kParcel) parcels_.sent(rank_, op.nbytes);
  } else {
    auto& receiver = static_cast<Receiver&>(*sent);
    if (receiver.mover_ != nullptr) receiver.mover_->moved(rank_, op.nbytes);
    receiver.handleSendCompletion(rank_);
    --receiver.unfinished_;
  }
  return true;
}

void Pair::fail(const char* doing, int error) {
  signalException(std::string(doing) + " " + peer_.str() + ": " + std::strerror(error));
}

// Receiving ---------------------------------------------------------------------------------

bool Pair::read() {
  Alive buffer;
  for (;;) {
    const iovec room = next_room(buffer);
    if (state_ == CLOSED) return false;
    if (room.iov_len == 0) break;
    const ssize_t count = fill(room);
    if (count > 0) {
      rx_.nread += count;
    } else if (count == 0) {
      signalException("Connection closed by peer " + peer_.str());
    } else if (errno == EAGAIN) {
      return false;
    } else if (errno != EINTR) {
      fail("Read error", errno);
    }
  }
  take_message(buffer);
  return true;
}

// Like recv(2) into `room`. Further available bytes are stored in beyond_, which saves system calls.
ssize_t Pair::fill(const iovec& room) {
  if (beyond_begin_ < beyond_end_) {
    const size_t bytes = std::min(room.iov_len, beyond_end_ - beyond_begin_);
    std::memcpy(room.iov_base, beyond_.get() + beyond_begin_, bytes);
    beyond_begin_ += bytes;
    return bytes;
  }
  if (std::exchange(is_drained_, false)) {
    errno = EAGAIN;
    return -1;
  }
  if (beyond_ == nullptr) beyond_.reset(new char[kBeyondBytes]);
  iovec rooms[] = {room, {beyond_.get(), kBeyondBytes}};
  msghdr message{};
  message.msg_iov = rooms;
  message.msg_iovlen = 2;
  const ssize_t count = recvmsg(fd_, &message, MSG_DONTWAIT);
  if (count <= 0) return count;
  const size_t arrived = count;
  is_drained_ = arrived < room.iov_len + kBeyondBytes;
  beyond_begin_ = 0;
  beyond_end_ = std::max(arrived, room.iov_len) - room.iov_len;
  return std::min(arrived, room.iov_len);
}

// Return memory for the next bytes of the message, empty if it is complete. `buffer` keeps the memory alive.
iovec Pair::next_room(Alive& buffer) {
  if (state_ == CLOSED) return {};
  if (rx_.nread < kHead) {
    return {reinterpret_cast<char*>(&rx_.preamble) + rx_.nread, kHead - rx_.nread};
  }
  const size_t code = rx_.preamble.opcode, arrived = rx_.nread - kHead;
  const size_t remaining = rx_.preamble.length - arrived;
  if (code == kNote || code == kParcel || code == kCall) {
    if (!parcel_ && rx_.preamble.length > kMostInParcel) signalException("a received message is too long");
    if (state_ == CLOSED) return {};
    if (!parcel_) parcel_.emplace(rx_.preamble.length);
    return {parcel_->memory.get() + arrived, remaining};
  }
  if (code != kSend) return {};
  if (!std::exchange(is_matched_, true)) match_buffer();
  if (!buffer) buffer = Alive(rx_.ubuf);
  if (buffer) return {static_cast<char*>(buffer->ptr) + rx_.offset + arrived, remaining};
  if (discarded_ == nullptr) discarded_.reset(new char[kDiscardBytes]);
  return {discarded_.get(), std::min(remaining, kDiscardBytes)};
}

// Select the first waiting receive in the message's slot. After this rank has left the group, drop messages.
void Pair::match_buffer() {
  GroupState& group_state = group_states_[rx_.preamble.roffset];
  SlotQueues& line = group_state.slots[rx_.preamble.slot];
  const bool is_wanted = !line.receives.empty();
  if (is_wanted) {
    const Part part = line.receives.front();
    line.receives.pop_front();
    rx_.ubuf = part.buffer;
    rx_.offset = part.offset;
    rx_.nbytes = part.bytes;
  }
  erase_if_idle(group_state.slots, rx_.preamble.slot);
  if (rx_.preamble.length > rx_.nbytes && (is_wanted || !group_state.is_over_here)) {
    signalException("received a message that no operation has requested");
  }
}

void Pair::take_message(const Alive& buffer) {
  const auto [bytes, code, slot, offset, length, group] = rx_.preamble;
  rx_ = {};
  is_matched_ = false;
  if (code == kSend && buffer) {
    auto& receiver = static_cast<Receiver&>(*buffer.operator->());
    if (receiver.mover_ != nullptr) receiver.mover_->moved(rank_, length);
    receiver.handleRecvCompletion(rank_);
    --receiver.unfinished_;
  }
  if (code == kSend) return;
  if (code == kParcel) {
    const auto group_state = group_states_.find(group);
    const bool is_over = group_state != group_states_.end() && group_state->second.is_over_here;
    parcels_.received(rank_, group, is_over, std::move(*parcel_));
    return parcel_.reset();
  }
  GroupState& group_state = group_states_[group];
  if (code == kCall) {
    if (!group_state.is_over_here) group_state.calls.push_back({slot, std::move(*parcel_)});
    parcel_.reset();
    return count(group_state.listener, rank_);
  }
  if (code == kNote) {
    const Parcel note = *std::exchange(parcel_, std::nullopt);
    if (!group_state.is_over_here) note_handler_(rank_, group, {note.memory.get(), length});
    group_state.is_over_there = slot != 0;
    if (group_state.is_over_here && group_state.is_over_there) group_states_.erase(group);
    return;
  }
  if (group_state.is_over_here) return;
  SlotQueues& line = group_state.slots[slot];
  std::list<Part> parts;
  if (line.sends.empty()) ++line.ready;
  else parts.splice(parts.end(), line.sends, line.sends.begin());
  erase_if_idle(group_state.slots, slot);
  try {
    for (const Part& part : parts) put(kSend, group, slot, part);
  } catch (const std::exception&) {
    // Ignore errors: the connection has ended, and signal_all() has notified the buffers.
  }
}

// Closing ------------------------------------------------------------------------------------------

void Pair::changeState(state next) noexcept {
  if (next == CLOSED && state_ == CONNECTED) {
    ended_at_ = Clock::now();
    if (ex_ != nullptr) signal_all();
    for (tcp::Op& op : tx_) op.ubuf = {};
    owned_.clear();
    held_.clear();
    parcels_.ended(rank_);
  }
  tcp::Pair::changeState(next);
}

// Let all waiting sends and receives fail.
void Pair::signal_all() noexcept {
  const auto signal = [&](const Weak& weak) {
    const Alive buffer(weak);
    if (buffer) static_cast<Receiver*>(buffer.operator->())->signalException(ex_);
  };
  for (const auto& [group, group_state] : group_states_) {
    signal(group_state.listener);
    for (const auto& [slot, line] : group_state.slots) {
      for (const Part& part : line.sends) signal(part.buffer);
      for (const Part& part : line.receives) signal(part.buffer);
    }
  }
}

// Buffers --------------------------------------------------------------------------------------

Receiver::Receiver(std::shared_ptr<Context> context, Route& route, void* data, size_t bytes, Mover* mover)
    : UnboundBuffer(std::move(context), data, bytes), route_(route), mover_(mover) {}

// The base class also waits, in ~UnboundBuffer, until no thread uses the buffer. That is too late, because
// the members of Receiver no longer exist then.
Receiver::~Receiver() {
  if (unfinished_ == 0) return;
  for (Pair* pair : pairs_) pair->forget(*this, group_);
}

void Receiver::begin(Pair& pair) {
  if (std::find(pairs_.begin(), pairs_.end(), &pair) == pairs_.end()) pairs_.push_back(&pair);
  ++unfinished_;
}

void Receiver::send(int peer, uint64_t slot, size_t offset, size_t bytes) {
  route_.pair_with(peer).send(*this, group_, slot, offset, std::min(bytes, size - offset));
}

void Receiver::recv(int peer, uint64_t slot, size_t offset, size_t bytes) {
  route_.pair_with(peer).receive(*this, group_, slot, offset, std::min(bytes, size - offset));
}

}  // namespace fl
