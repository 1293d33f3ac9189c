// A turn, for example to run a collective, that one thread holds at a time.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace fl {

// A lock that knows its owner. A signal handler may run on a thread that is inside a collective. Calls of the
// handler must not wait for that collective.
class Turn {
 public:
  // Take the turn. Return false if any thread holds it, including this thread.
  bool try_take() {
    // Both memory orders are seq_cst: a failure needs the single order below, and allows no weaker success.
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

  // Releases the turn at the end of the block.
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
  // Single order (seq_cst) of both members: a waiter sees the turn free, or release() sees the waiter.
  std::atomic<std::thread::id> owner_{};
  std::atomic<int> waiting_{0};
  std::mutex mutex_;  // held so that no thread falls asleep between both accesses
  std::condition_variable released_;
};

}  // namespace fl
