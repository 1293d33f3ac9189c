// Whose turn it is to run a collective: one thread's at a time.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

namespace fl {

// A lock that knows its owner. A signal handler runs on a thread that may be in the middle of a
// collective, and whatever it calls must not wait for that.
class Turn {
 public:
  // False where a thread has it, also this one.
  bool try_take() { return !is_mine() && taken(mutex_.try_lock()); }
  bool try_take_for(long milliseconds) {
    return !is_mine() && taken(mutex_.try_lock_for(std::chrono::milliseconds(milliseconds)));
  }
  void give() {
    owner_.store({}, std::memory_order_relaxed);
    mutex_.unlock();
  }
  bool is_mine() const {
    return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }

 private:
  bool taken(bool is_taken) {
    if (is_taken) owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    return is_taken;
  }

  std::timed_mutex mutex_;
  std::atomic<std::thread::id> owner_{};
};

}  // namespace fl
