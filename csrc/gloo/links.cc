#include "links.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <cstring>

#include "line.h"

namespace fl {
namespace {

// Maximum number of attempts to connect, in addition to two per rank.
constexpr size_t kSpareAttempts = 64;

// Maximum time for which a waiting thread reads a connection itself. This saves the wake-ups of Gloo's thread
// and of the waiting thread, which take a fraction of this time.
constexpr std::chrono::microseconds kBrief{1000};

// Number of polls before a waiting thread sleeps between polls. A wake-up can take as long as the way of a
// message from host to host. kRestNanoseconds: maximum time of such a sleep. It must be short, because another
// thread may read the awaited data, which does not end the sleep.
constexpr int kYields = 200;
constexpr long kRestNanoseconds = 100000;

// Time between an alarm and Pair::settle(). A message that no thread awaits may be read later by two such times.
constexpr long kSettleNanoseconds = 1000000;

// Thrown if the peer closed the connection or is not in this group. The right peer may still connect.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace

class Links::Listener : public Handler {
 public:
  // `descriptor` is a listening socket or the timer.
  Listener(Links& links, int descriptor, bool is_timer) : socket(descriptor), links_(links), is_timer_(is_timer) {
    if (socket < 0) fail_in("timerfd_create");
  }
  ~Listener() override { close(); }

  void close() noexcept {
    if (socket >= 0) ::close(socket);
    socket = -1;
  }

  void handleEvents(int) override { is_timer_ ? links_.ring() : links_.accept(); }

  int socket;

 private:
  Links& links_;
  const bool is_timer_;
};

// A connection until both ends have exchanged proofs. Events arrive on Gloo's thread.
class Links::Attempt : public Handler {
 public:
  static constexpr char kStranger[] = "the process that connected as this rank does not know the secret of this job";

  // If this rank connects, `peer` is the target. With `asks_of`, this rank only asks how many calls of that
  // group the peer has begun. If a peer connects, `peer` is -1 until its greeting arrives.
  Attempt(Links& links, int socket, int peer, std::optional<uint64_t> asks_of = {})
      : socket(socket),
        is_ours(peer >= 0),
        peer(peer),
        asks_of(asks_of),
        links_(links),
        is_connected_(peer < 0) {
    const int on = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  ~Attempt() override {
    if (!is_taken) ::close(socket);
  }
  Attempt(const Attempt&) = delete;

  void handleEvents(int) override {
    try {
      serve();
    } catch (const Refused& error) {
      links_.ended(*this, error.what(), true);
    } catch (const std::exception& error) {
      links_.ended(*this, error.what(), false);
    }
  }

  // From any thread: let Gloo's thread end this attempt.
  void cancel() noexcept { shutdown(socket, SHUT_RDWR); }

  const int socket;
  const bool is_ours;
  int peer;
  std::optional<uint64_t> asks_of;
  int64_t calls = 0;      // the peer's answer if `asks_of` is set
  bool has_slot = false;  // accepted as the connection with this peer
  bool is_taken = false;  // a Pair has the socket now

 private:
  // The connecting end sends its Greeting first. If the proof is valid, the other end answers with its own.
  struct Greeting {
    int32_t rank;
    int32_t asks;  // 1: only asks for the number of calls in `group`
    uint64_t group;
    int64_t calls;  // the answer: number of calls begun in `group`
    char proof[FL_PROOF_BYTES];
  };

  // ended() destroys this object, so serve() calls it last.
  void serve() {
    if (!is_connected_) {
      int error = 0;
      socklen_t size = sizeof error;
      getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size);
      if (error != 0) throw std::system_error(error, std::generic_category());
      is_connected_ = true;
      greet();
      return links_.device_->registerDescriptor(socket, EPOLLIN, this);
    }
    if (!receive()) return;
    if (is_ours) {
      if (!links_.prover_.is_shown_by(peer, peer_greeting_.proof)) throw std::runtime_error(kStranger);
      calls = peer_greeting_.calls;
    } else {
      peer = peer_greeting_.rank;
      if (peer_greeting_.asks != 0) asks_of = peer_greeting_.group;
      if (peer < 0 || peer >= links_.size || peer == links_.rank) throw Refused("the rank is invalid");
      if (!links_.prover_.is_shown_by(peer, peer_greeting_.proof)) {
        answer(Greeting{});  // shows the peer that the secrets differ
        throw Refused(kStranger);
      }
      if (!asks_of && !links_.has_slot(*this)) throw Refused("the connection exists already");
      greet();
    }
    if (!asks_of) links_.adopt(*this);
    links_.ended(*this, {}, false);
  }

  void greet() {
    Greeting own_greeting{links_.rank, asks_of ? 1 : 0, asks_of.value_or(0), 0, {}};
    if (!is_ours && asks_of) own_greeting.calls = links_.calls_(*asks_of);
    std::memcpy(own_greeting.proof, links_.prover_.shown_to(peer).data(), sizeof own_greeting.proof);
    answer(own_greeting);
  }

  void answer(const Greeting& greeting) {
    const ssize_t sent = send(socket, &greeting, sizeof greeting, MSG_NOSIGNAL);
    if (sent != sizeof greeting) throw Refused("the connection broke");
  }

  // Read exactly one greeting, because later bytes belong to the Pair. Return true if it is complete.
  bool receive() {
    char* const into = reinterpret_cast<char*>(&peer_greeting_) + received_;
    const ssize_t count = recv(socket, into, sizeof peer_greeting_ - received_, 0);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (count <= 0) throw Refused("the connection was closed");
    received_ += count;
    return received_ == sizeof peer_greeting_;
  }

  Links& links_;
  bool is_connected_;
  Greeting peer_greeting_{};
  size_t received_ = 0;
};

Links::Links(std::shared_ptr<Device> device, int rank, int size, bool listens_on)
    : Context(std::move(device), rank, size),
      listens_on_(listens_on),
      listener_(std::make_unique<Listener>(*this, listening_socket(*device_), false)),
      timer_(std::make_unique<Listener>(
          *this, timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC), true)),
      descriptors_(size + 3),
      states_(new std::atomic<int>[size]()),
      problems_(size) {
  address_ = address_of(listener_->socket);
  const int loop = descriptor_of(*device_);
  fcntl(loop, F_SETFD, FD_CLOEXEC);
  descriptors_.add(loop);
  descriptors_.add(listener_->socket);
  descriptors_.add(timer_->socket);
}

Links::~Links() { close(); }

void Links::open(const char* addresses, size_t bytes, const char* key, ConnectedHandler on_connected,
                 Pair::NoteHandler note_handler, Calls calls, Parcels& parcels) {
  addresses_.assign(addresses, bytes * size);
  prover_ = {rank, std::string(key, FL_KEY_BYTES)};
  on_connected_ = std::move(on_connected);
  note_handler_ = std::move(note_handler);
  calls_ = std::move(calls);
  parcels_ = &parcels;
  const std::lock_guard<std::mutex> lock(lock_);
  if (listener_ == nullptr) throw Failure(FL_CLOSED, {}, "closed while connecting");
  is_open_ = true;
  device_->registerDescriptor(listener_->socket, EPOLLIN, listener_.get());
  device_->registerDescriptor(timer_->socket, EPOLLIN, timer_.get());
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
    if (was_open) remove(timer_->socket);
    for (const auto& entry : attempts_) {
      if (!entry.first->is_taken) remove(entry.first->socket);
    }
  }
  changed_.notify_all();
  if (was_open) settle();
  attempts_.clear();
  for (int peer = 0; peer < size; ++peer) {
    if (is_connected(peer)) pairs_[peer]->close();
  }
}

// Wait until Gloo's thread no longer uses this object. Gloo's thread handles registrations in their order.
void Links::settle() const {
  device_->registerDescriptor(timer_->socket, EPOLLIN, timer_.get());
  device_->unregisterDescriptor(timer_->socket, timer_.get());
}

void Links::set_alarm() noexcept {
  const itimerspec time{{}, {0, kSettleNanoseconds}};
  if (!is_set_.exchange(true)) timerfd_settime(timer_->socket, 0, &time, nullptr);
}

void Links::ring() {
  uint64_t count;
  if (::read(timer_->socket, &count, sizeof count) < 0) return;
  is_set_ = false;
  bool again = false;
  for (int peer = 0; peer < size; ++peer) again |= is_connected(peer) && pair(peer)->settle();
  if (again) set_alarm();
}

void Links::remove(int socket) const noexcept {
  epoll_ctl(descriptor_of(*device_), EPOLL_CTL_DEL, socket, nullptr);
}

void Links::read(gloo::transport::UnboundBuffer& buffer, int peer) {
  auto& receiver = static_cast<Receiver&>(buffer);
  if (receiver.received() > 0 || !is_connected(peer)) return;
  Pair& pair = *this->pair(peer);
  const auto end = Clock::now() + kBrief;
  hurry();
  pair.set_served(false);
  for (int polls = 0;; ++polls) {
    pair.read_available();
    if (receiver.received() > 0 || Clock::now() >= end) break;
    rest({&pair}, polls);
  }
  const bool in_vain = receiver.received() == 0;
  if (in_vain || Pair::sleepers > 0) pair.set_served(true);
}

void Links::rest(const std::vector<Pair*>& pairs, int polls) {
  if (polls < kYields || pairs.empty()) return yield_processor();
  std::vector<pollfd> sockets;
  for (Pair* pair : pairs) sockets.push_back({pair->socket(), POLLIN, 0});
  const timespec time{0, kRestNanoseconds};
  ppoll(sockets.data(), sockets.size(), &time, nullptr);
}

void Links::hurry() const {
  for (int peer = 0; peer < size; ++peer) {
    if (Pair* const pair = this->pair(peer)) pair->hurry(Pair::kSoon);
  }
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

// Requires the lock.
void Links::begin(int peer, std::optional<uint64_t> asks_of) {
  const sockaddr_storage address = read_address(&addresses_[address_.size() * peer], address_.size());
  const int connection = socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (connection < 0) fail_in("socket");
  auto attempt = std::make_unique<Attempt>(*this, connection, peer, asks_of);
  const socklen_t bytes = address.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  if (connect(connection, reinterpret_cast<const sockaddr*>(&address), bytes) != 0 && errno != EINPROGRESS) {
    explain(peer, std::generic_category().message(errno));
    if (asks_of) answers_[peer] = kAbsent;
    if (!asks_of) states_[peer] = kFailed;
    return;
  }
  if (!asks_of) states_[peer] = kConnecting;
  Attempt* const begun = attempt.get();
  attempts_.emplace(begun, std::move(attempt));
  device_->registerDescriptor(connection, EPOLLOUT, begun);
}

// Do not replace kStranger: after this problem, the peer closes the connection, which causes another error.
void Links::explain(int peer, const std::string& problem) {
  if (problems_[peer] != Attempt::kStranger) problems_[peer] = problem;
}

// On Gloo's thread -----------------------------------------------------------------------------

void Links::accept() {
  const std::lock_guard<std::mutex> lock(lock_);
  if (!is_open_) return;
  const int connection = accept4(listener_->socket, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (connection < 0) return;
  auto attempt = std::make_unique<Attempt>(*this, connection, -1);
  Attempt* const begun = attempt.get();
  const auto other = std::find_if(attempts_.begin(), attempts_.end(),
                                  [](const auto& entry) { return !entry.first->is_ours; });
  if (attempts_.size() >= 2 * size + kSpareAttempts && other != attempts_.end()) other->first->cancel();
  attempts_.emplace(begun, std::move(attempt));
  device_->registerDescriptor(connection, EPOLLIN, begun);
}

// True if the accepted connection becomes the connection with its peer. If both ranks connect to each other,
// the connection that the lower rank opened is used.
bool Links::has_slot(Attempt& attempt) {
  const std::lock_guard<std::mutex> lock(lock_);
  const int peer = attempt.peer;
  if (!is_open_ || states_[peer] == kConnected) return false;
  if (states_[peer] == kConnecting && rank < peer) return false;
  for (const auto& entry : attempts_) {
    if (entry.first->is_ours && entry.first->peer == peer && !entry.first->asks_of) entry.first->cancel();
  }
  states_[peer] = kConnecting;
  return attempt.has_slot = true;
}

void Links::adopt(Attempt& attempt) {
  const std::lock_guard<std::mutex> lock(lock_);
  if (!is_open_ || states_[attempt.peer] == kConnected) return;
  remove(attempt.socket);
  pairs_[attempt.peer] = std::make_unique<Pair>(this, device_.get(), attempt.peer, attempt.socket, note_handler_,
                                                *parcels_, [this] { set_alarm(); });
  attempt.is_taken = true;
  descriptors_.add(attempt.socket);
  if (seconds_ > 0) keep_alive(attempt.socket, seconds_);
  on_connected_(attempt.peer, static_cast<Pair&>(*pairs_[attempt.peer]));
  states_[attempt.peer].store(kConnected, std::memory_order_release);
  // If all peers are connected, close the listener, unless calls_of() may still need it.
  for (int peer = 0; peer < size; ++peer) {
    if (listens_on_ || (peer != rank && !is_connected(peer))) return;
  }
  remove(listener_->socket);
  listener_->close();
}

// If `is_refused`, await() may connect again: the peer has closed this connection and may open another one.
void Links::ended(Attempt& attempt, const std::string& problem, bool is_refused) {
  const std::lock_guard<std::mutex> lock(lock_);
  const int peer = attempt.peer;
  if (attempt.is_ours && attempt.asks_of) {
    answers_[peer] = problem.empty() ? attempt.calls : kAbsent;
  } else if (attempt.has_slot && states_[peer] == kConnecting) {
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
  if (peer >= 0) parcels_->ended(peer);  // tells waiting senders to check the connection
}

}  // namespace fl
