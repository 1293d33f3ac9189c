#include "waiter.h"

#include <algorithm>

#include "pair.h"

namespace fl {
namespace {

// Timeout for Gloo's waits. It never passes: Watch ends waits, because Gloo's timeout closes connections.
constexpr std::chrono::hours kForever{10000};

}  // namespace

Watch::Watch() : thread_(&Watch::work, this) {}

Watch::~Watch() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void Watch::soon(std::function<void()> chore) {
  const std::lock_guard<std::mutex> lock(mutex_);
  chores_.push_back(std::move(chore));
  changed_.notify_one();
}

// Tick until one tick after the last wait has ended. Operations that start before need not wake this thread.
void Watch::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!closing_) {
    if (waiters_.empty()) {
      ticking_ = false;
      changed_.wait(lock, [&] { return closing_ || ticking_ || !chores_.empty(); });
    }
    changed_.wait_for(lock, kTick, [&] { return closing_ || !chores_.empty(); });
    wake_concerned();
    do_chores(lock);
  }
}

// Run the chores without the lock, because they may end waits, which needs the lock.
void Watch::do_chores(std::unique_lock<std::mutex>& lock) {
  const auto chores = std::exchange(chores_, {});
  lock.unlock();
  for (const auto& chore : chores) chore();
  lock.lock();
}

void Watch::wake_concerned() {
  const auto now = Clock::now();
  for (Waiter* waiter : waiters_) {
    if (waiter->is_concerned(now)) waiter->wake();
  }
}

void Connections::end(const Failure& reason) noexcept {
  set_reason(reason);
  const std::lock_guard<std::mutex> lock(watch.mutex_);
  for (Waiter* waiter : watch.waiters_) {
    if (&waiter->connections_ == this) waiter->wake();
  }
  wake();
}

void Connections::set_reason(const Failure& reason) noexcept {
  const std::lock_guard<std::mutex> lock(watch.mutex_);
  if (!reason_) reason_ = reason;
  watch.ended_.notify_all();
}

std::optional<Failure> Connections::reason(Clock::time_point end) const {
  std::unique_lock<std::mutex> lock(watch.mutex_);
  watch.ended_.wait_until(lock, end, [&] { return reason_.has_value(); });
  return reason_;
}

void Connections::wake_concerned() noexcept {
  const std::lock_guard<std::mutex> lock(watch.mutex_);
  watch.wake_concerned();
  wake();
}

Waiter::Waiter(Connections& connections, Clock::time_point deadline, InterruptCheck interrupt)
    : connections_(connections), deadline_(deadline), interrupt_(interrupt) {
  current_ = this;
}

Waiter::~Waiter() { current_ = outer_; }

thread_local Waiter* Waiter::current_ = nullptr;

void Waiter::received(gloo::transport::UnboundBuffer& buffer, int peer) {
  using gloo::transport::UnboundBuffer;
  connections_.read(buffer, peer);
  wait(buffer, peer, {&UnboundBuffer::waitRecv, &UnboundBuffer::abortWaitRecv, &Receiver::received});
}

void Waiter::sent(gloo::transport::UnboundBuffer& buffer, int peer) {
  using gloo::transport::UnboundBuffer;
  wait(buffer, peer, {&UnboundBuffer::waitSend, &UnboundBuffer::abortWaitSend, &Receiver::sent});
}

// Wait again if the wait was woken without a reason to end, or if Gloo reported the end of the connection
// before it reported data that had arrived.
void Waiter::wait(gloo::transport::UnboundBuffer& buffer, int peer, const WaitFunctions& functions) {
  const auto has_ended = [&] { return (static_cast<Receiver&>(buffer).*functions.count)() > 0; };
  for (;;) {
    enter(buffer, peer, functions.abort);
    bool finished = false;
    std::optional<std::string> error;
    try {
      finished = (buffer.*functions.wait)(nullptr, kForever);
    } catch (const std::exception& exception) {
      error = exception.what();
    }
    leave();
    if (finished) break;
    if (has_ended()) continue;
    if (error) throw connections_.explain(peer, *error);
    check(peer);
    if (peer_is_lost_ && connections_.has_ended_sending(peer) && !has_ended()) check(peer);
  }
  peer_is_lost_ = false;
}

void Waiter::enter(gloo::transport::UnboundBuffer& buffer, int peer, Abort abort) {
  const std::lock_guard<std::mutex> lock(watch_.mutex_);
  if (connections_.reason_) throw Failure(*connections_.reason_);
  watch_.waiters_.push_back(this);
  if (!std::exchange(watch_.ticking_, true)) watch_.changed_.notify_one();
  ++Pair::sleepers;
  buffer_ = &buffer;
  abort_ = abort;
  peer_ = peer;
}

void Waiter::leave() noexcept {
  const std::lock_guard<std::mutex> lock(watch_.mutex_);
  --Pair::sleepers;
  std::vector<Waiter*>& waiters = watch_.waiters_;
  waiters.erase(std::find(waiters.begin(), waiters.end(), this));
}

// Requires the watch's mutex. If the wait has ended, this wakes the next wait, which then waits again.
void Waiter::wake() noexcept { (buffer_->*abort_)(); }

bool Waiter::is_concerned(Clock::time_point now) const {
  return connections_.reason_ || interrupt_ != nullptr || now >= deadline_ || connections_.is_lost(peer_);
}

void Waiter::check(int peer) {
  if (const auto reason = connections_.reason()) throw Failure(*reason);
  if (is_interrupted()) throw Failure(FL_CLOSED, {}, kInterrupted);
  if (Clock::now() >= deadline_) throw TimedOut(peer);
  if (!connections_.is_lost(peer)) return;
  // Gloo does not wake every wait for a lost peer. Raise only at the second check: data may arrive before it.
  if (peer_is_lost_) throw connections_.explain(peer, "the connection broke");
  peer_is_lost_ = true;
}

}  // namespace fl
