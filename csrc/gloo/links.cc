#include "links.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>

#include "attempt.h"
#include "line.h"

namespace fl {
namespace {

// Connections that have proven nothing yet, beyond one for each rank; more are a flood.
constexpr size_t kSpareAttempts = 64;

// How long a wait reads the connection itself: a few times what it takes to have Gloo's thread
// scheduled, and then the one that waits. Half of that after a wait for which it was too short, and so
// on: nobody burns what others need where hosts are far, or threads more than processors. Every so many
// waits the whole time is tried again, as waits in which nobody reads are longer.
constexpr std::chrono::microseconds kBrief{600};
constexpr int kMostVain = 6;
constexpr unsigned kTryEvery = 8;

}  // namespace

class Links::Listener : public Handler {
 public:
  // Of a socket that listens, or another descriptor, on which nothing happens.
  Listener(Links& links, int descriptor) : links_(links), socket(descriptor) {
    if (socket < 0) fail_in("eventfd");
  }
  ~Listener() override { close(); }

  // Nobody can come any more.
  void close() noexcept {
    if (socket >= 0) ::close(socket);
    socket = -1;
  }

  void handleEvents(int) override { links_.accept(); }

 private:
  Links& links_;

 public:
  int socket;
};

Links::Links(std::shared_ptr<Device> device, int rank, int size, bool listens_on)
    : Context(std::move(device), rank, size),
      listens_on_(listens_on),
      listener_(std::make_unique<Listener>(*this, listening_socket(*device_))),
      settles_(std::make_unique<Listener>(*this, eventfd(0, EFD_CLOEXEC))),
      descriptors_(size + 2),
      states_(new std::atomic<int>[size]()),
      problems_(size) {
  address_ = address_of(listener_->socket);
  const int loop = descriptor_of(*device_);
  fcntl(loop, F_SETFD, FD_CLOEXEC);
  descriptors_.add(loop);
  descriptors_.add(listener_->socket);
}

Links::~Links() { close(); }

void Links::open(const char* addresses, size_t bytes, const char* key, Made made, Pair::Told told,
                 Calls calls, Parcels& parcels) {
  addresses_.assign(addresses, bytes * size);
  prover_ = {rank, std::string(key, FL_KEY_BYTES)};
  made_ = std::move(made);
  told_ = std::move(told);
  calls_ = std::move(calls);
  parcels_ = &parcels;
  const std::lock_guard<std::mutex> lock(lock_);
  if (listener_ == nullptr) throw Failure(FL_CLOSED, {}, "closed while connecting");
  is_open_ = true;
  device_->registerDescriptor(listener_->socket, EPOLLIN, listener_.get());
}

void Links::close() noexcept {
  const std::lock_guard<std::mutex> closing(closing_);
  std::unique_ptr<Listener> listener;
  bool was_open;
  {
    const std::lock_guard<std::mutex> lock(lock_);
    listener = std::move(listener_);
    was_open = std::exchange(is_open_, false);
    if (was_open) remove(listener->socket);
    for (const auto& each : attempts_) {
      if (!each.first->is_taken) remove(each.first->socket);  // Gloo's is removed where it is closed
    }
  }
  changed_.notify_all();
  if (was_open) settle();
  attempts_.clear();
  for (int peer = 0; peer < size; ++peer) {
    if (is_connected(peer)) pairs_[peer]->close();
  }
}

// Return when Gloo's thread does nothing here any more: it takes nothing from what it serves before.
void Links::settle() const {
  device_->registerDescriptor(settles_->socket, EPOLLIN, settles_.get());
  device_->unregisterDescriptor(settles_->socket, settles_.get());
}

void Links::remove(int socket) const noexcept {
  epoll_ctl(descriptor_of(*device_), EPOLL_CTL_DEL, socket, nullptr);
}

void Links::read(gloo::transport::UnboundBuffer& buffer, int peer) {
  auto& wanted = static_cast<Receiver&>(buffer);
  if (wanted.received() > 0 || !is_connected(peer)) return;
  Pair& pair = *this->pair(peer);
  const int vain = vain_.load(std::memory_order_relaxed);
  const bool tries = reads_.fetch_add(1, std::memory_order_relaxed) % kTryEvery == 0;
  const auto end = Clock::now() + kBrief / (tries ? 1 : 1 << vain);
  pair.is_served(false);
  for (;;) {
    pair.read_what_has_arrived();
    if (wanted.received() > 0 || Clock::now() >= end) break;
    sched_yield();
  }
  pair.is_served(true);
  const int next = wanted.received() == 0 ? std::min(vain + 1, kMostVain) : tries ? 0 : vain / 2;
  vain_.store(next, std::memory_order_relaxed);
}

// Connecting -----------------------------------------------------------------------------------

void Links::reach(int peer) {
  const std::lock_guard<std::mutex> lock(lock_);
  if (states_[peer] != kNone || !is_open_) return;
  begin(peer);
}

std::string Links::problem(int peer) {
  const std::lock_guard<std::mutex> lock(lock_);
  return problems_[peer];
}

bool Links::await(int peer, Clock::time_point end) {
  reach(peer);
  std::unique_lock<std::mutex> lock(lock_);
  changed_.wait_until(lock, end, [&] {
    return states_[peer] == kConnected || states_[peer] == kFailed || !is_open_;
  });
  if (!is_open_) throw Failure(FL_CLOSED, {}, kWasClosed);
  if (states_[peer] == kFailed) throw Failure(FL_PEER_LOST, {peer}, problems_[peer]);
  return states_[peer] == kConnected;
}

std::map<int, int64_t> Links::calls_of(const std::vector<int>& peers, uint64_t group, Clock::time_point end) {
  const std::lock_guard<std::mutex> asking(asking_);
  std::unique_lock<std::mutex> lock(lock_);
  answers_.clear();
  if (!is_open_) return {};
  for (int peer : peers) begin(peer, group);
  changed_.wait_until(lock, end, [&] { return answers_.size() == peers.size() || !is_open_; });
  auto answers = answers_;
  for (int peer : peers) answers.emplace(peer, kSilent);
  return answers;
}

// The lock is held.
void Links::begin(int peer, std::optional<uint64_t> asks_of) {
  const sockaddr_storage where = read_address(&addresses_[address_.size() * peer], address_.size());
  const int made = socket(where.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (made < 0) fail_in("socket");
  auto attempt = std::make_unique<Attempt>(*this, made, peer, asks_of);
  const socklen_t bytes = where.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  if (connect(made, reinterpret_cast<const sockaddr*>(&where), bytes) != 0 && errno != EINPROGRESS) {
    explain(peer, std::generic_category().message(errno));
    if (asks_of) answers_[peer] = kAbsent;
    if (!asks_of) states_[peer] = kFailed;
    return;
  }
  if (!asks_of) states_[peer] = kConnecting;
  Attempt* const begun = attempt.get();
  attempts_.emplace(begun, std::move(attempt));
  device_->registerDescriptor(made, EPOLLOUT, begun);
}

// A peer that has not proven itself here gives up and goes: that it has gone is not the reason.
void Links::explain(int peer, const std::string& problem) {
  if (problems_[peer] != Attempt::kStranger) problems_[peer] = problem;
}

// On Gloo's thread -----------------------------------------------------------------------------

void Links::accept() {
  const std::lock_guard<std::mutex> lock(lock_);
  if (!is_open_) return;
  const int made = accept4(listener_->socket, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (made < 0) return;  // the other end has closed it again
  auto attempt = std::make_unique<Attempt>(*this, made, -1);
  Attempt* const begun = attempt.get();
  const auto other = std::find_if(attempts_.begin(), attempts_.end(),
                                  [](const auto& each) { return !each.first->is_ours; });
  if (attempts_.size() >= 2 * size + kSpareAttempts && other != attempts_.end()) other->first->cancel();
  attempts_.emplace(begun, std::move(attempt));
  device_->registerDescriptor(made, EPOLLIN, begun);
}

void Links::listen_to(Attempt& attempt) {
  device_->registerDescriptor(attempt.socket, EPOLLIN, &attempt);
}

// Where both ends have begun, the one of the lower rank stays.
bool Links::has_place(Attempt& attempt) {
  const std::lock_guard<std::mutex> lock(lock_);
  const int peer = attempt.peer;
  if (!is_open_ || states_[peer] == kConnected) return false;
  if (states_[peer] == kConnecting && rank < peer) return false;
  for (const auto& each : attempts_) {
    if (each.first->is_ours && each.first->peer == peer && !each.first->asks_of) each.first->cancel();
  }
  states_[peer] = kConnecting;
  return attempt.has_place = true;
}

void Links::adopt(Attempt& attempt) {
  const std::lock_guard<std::mutex> lock(lock_);
  if (!is_open_ || states_[attempt.peer] == kConnected) return;
  remove(attempt.socket);
  pairs_[attempt.peer] = std::make_unique<Pair>(this, device_.get(), attempt.peer, attempt.socket, told_, *parcels_);
  attempt.is_taken = true;
  descriptors_.add(attempt.socket);
  if (seconds_ > 0) keep_alive(attempt.socket, seconds_);
  made_(attempt.peer, static_cast<Pair&>(*pairs_[attempt.peer]));
  states_[attempt.peer].store(kConnected, std::memory_order_release);
  // Nothing listens where all are connected, and nobody is asked: see calls_of.
  for (int peer = 0; peer < size; ++peer) {
    if (listens_on_ || (peer != rank && !is_connected(peer))) return;
  }
  remove(listener_->socket);
  listener_->close();
}

// Refused: the other end has gone, or its own attempt stays: whoever waits tries again.
void Links::ended(Attempt& attempt, const std::string& problem, bool is_refused) {
  const std::lock_guard<std::mutex> lock(lock_);
  const int peer = attempt.peer;
  if (attempt.is_ours && attempt.asks_of) {
    answers_[peer] = problem.empty() ? attempt.calls : kAbsent;
  } else if (attempt.has_place && states_[peer] == kConnecting) {
    states_[peer] = kNone;
  } else if (attempt.is_ours && states_[peer] == kConnecting) {
    states_[peer] = is_refused ? kNone : kFailed;
    explain(peer, problem);
  } else if (!attempt.is_ours && problem == Attempt::kStranger) {
    explain(peer, problem);
  }
  if (!attempt.is_taken) remove(attempt.socket);
  attempts_.erase(&attempt);
  changed_.notify_all();
  if (peer >= 0) parcels_->ended(peer);  // whoever wants to send looks again
}

}  // namespace fl
