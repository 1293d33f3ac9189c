// Run a function for each rank, in threads or processes.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace stress {

inline void in_threads(int ranks, const std::function<void(int)>& run) {
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) threads.emplace_back(run, r);
  for (std::thread& thread : threads) thread.join();
}

// The program fails unless all processes succeed.
void in_processes(int ranks, const std::function<void(int)>& run);

// A latch that opens when its count reaches zero.
class Latch {
 public:
  explicit Latch(int count) : count_(count) {}

  void count_down() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--count_ == 0) opened_.notify_all();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    opened_.wait(lock, [this] { return count_ <= 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  int count_;
};

}  // namespace stress
