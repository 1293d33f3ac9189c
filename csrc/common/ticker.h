// A thread that runs a function periodically while there is work.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "atomic.h"

namespace fl {

class Ticker {
 public:
  Ticker(std::chrono::milliseconds period, std::function<void()> tick) : period_(period), tick_(std::move(tick)) {}
  ~Ticker() { stop(); }
  Ticker(const Ticker&) = delete;

  // Tick for at least kTicks more periods. If activate() is called again in this time, it need not wake the
  // thread. Not thread-safe. Throws if no thread can be created.
  void activate() {
    remaining_ticks_.store(kTicks);
    if (is_awake_.load()) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!thread_.joinable() && !stopping_) thread_ = std::thread(&Ticker::work, this);
    activated_.notify_one();
  }

  // Stop the thread. After stop() has returned, no tick runs.
  void stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      activated_.notify_one();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  static constexpr int kTicks = sized(50, 3);

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_) {
      // Either a concurrent activate() sees false and notifies, or this thread sees the new count (seq_cst).
      is_awake_.store(false);
      activated_.wait(lock, [this] { return stopping_ || remaining_ticks_.load() > 0; });
      is_awake_.store(true, std::memory_order_relaxed);  // relaxed: reading false only wakes in vain
      while (!stopping_ && remaining_ticks_.fetch_sub(1, std::memory_order_acquire) > 0) {
        if (activated_.wait_for(lock, period_, [this] { return stopping_; })) break;
        lock.unlock();
        tick_();
        lock.lock();
      }
    }
  }

  const std::chrono::milliseconds period_;
  const std::function<void()> tick_;
  std::atomic<int> remaining_ticks_{0};
  std::atomic<bool> is_awake_{false};
  std::mutex mutex_;
  std::condition_variable activated_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace fl
