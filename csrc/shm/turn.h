// Whose turn it is, such as to run a collective: one thread's at a time.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace fl {

// A lock that knows its owner. A signal handler runs on a thread that may be in the middle of a
// collective, and whatever it calls must not wait for that.
class Turn {
 public:
  // False where a thread has it, also this one.
  bool try_take() {
    // Its failure is what must be in one order, see below, and may not be stronger than its success.
    std::thread::id nobody;
    return owner_.compare_exchange_strong(nobody, std::this_thread::get_id());
  }

  bool try_take_for(long milliseconds) {
    if (try_take()) return true;
    if (is_mine()) return false;
    std::unique_lock<std::mutex> lock(mutex_);
    ++waiting_;
    const auto limit = std::chrono::milliseconds(milliseconds);
    const bool taken = given_.wait_for(lock, limit, [this] { return try_take(); });
    waiting_.fetch_sub(1, std::memory_order_relaxed);
    return taken;
  }

  void give() {
    owner_.store(std::thread::id());
    if (waiting_ == 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    given_.notify_one();
  }

  // Taken, until the end of the block.
  class Held {
   public:
    explicit Held(Turn& turn) : turn_(turn) {}
    ~Held() { turn_.give(); }
    Held(const Held&) = delete;

   private:
    Turn& turn_;
  };

  bool is_mine() const { return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

 private:
  // These two in one order (seq_cst): who waits sees the turn given, or is seen by who gives it.
  std::atomic<std::thread::id> owner_{};
  std::atomic<int> waiting_{0};
  std::mutex mutex_;  // so that nobody goes to sleep between the two
  std::condition_variable given_;
};

}  // namespace fl
