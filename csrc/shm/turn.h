// A lock for an activity of one thread at a time, for example to run a collective.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace fl {

// A lock that knows its owner. If a signal handler interrupts a thread inside a collective, the handler's own
// calls must fail, because that collective cannot continue before the handler ends.
class Turn {
 public:
  // Take the turn. Return false if any thread has it, also if this thread has it.
  bool try_take() {
    // The default memory order is seq_cst, also if the exchange fails: see owner_.
    std::thread::id no_thread;
    return owner_.compare_exchange_strong(no_thread, std::this_thread::get_id());
  }

  bool try_take_for(long milliseconds) {
    if (try_take()) return true;
    if (is_owner()) return false;
    std::unique_lock<std::mutex> lock(mutex_);
    ++waiting_;
    const auto limit = std::chrono::milliseconds(milliseconds);
    const bool taken = released_.wait_for(lock, limit, [this] { return try_take(); });
    waiting_.fetch_sub(1, std::memory_order_relaxed);
    return taken;
  }

  void release() {
    owner_.store(std::thread::id());
    if (waiting_ == 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    released_.notify_one();
  }

  class Guard {
   public:
    explicit Guard(Turn& turn) : turn_(turn) {}
    ~Guard() { turn_.release(); }
    Guard(const Guard&) = delete;

   private:
    Turn& turn_;
  };

  bool is_owner() const { return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

 private:
  // owner_ and waiting_ use seq_cst: a waiting thread sees the release, or release() sees the waiting thread.
  std::atomic<std::thread::id> owner_{};
  std::atomic<int> waiting_{0};
  std::mutex mutex_;  // prevents a notification between a waiter's check and its sleep
  std::condition_variable released_;
};

}  // namespace fl
