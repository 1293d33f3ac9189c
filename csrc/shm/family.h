// State that a group on one host shares with its subgroups: message memory and engine.
#pragma once

#include "../common/engine.h"
#include "../common/queue.h"
#include "../common/ticker.h"
#include "remote.h"
#include "rings.h"
#include "segment.h"

namespace fl {

class Family {
 public:
  Family(Mapping mapping, int rank, int size)
      : segment(std::move(mapping), size), remote(segment, rank, size), rings(segment, remote, rank, size),
        engine(rings, size) {}
  Family(const Family&) = delete;

  // Add a group. After activate(), `tick` is called every 8 ms for some time.
  void join(uint64_t number, std::function<void()> tick) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ticks_[number] = std::move(tick);
  }
  // Start the ticks. Throws if the thread cannot be created.
  void activate() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ticker_.activate();
  }
  // Remove a group. Its `tick` is not called again. If it was the last group, all threads stop.
  void leave(uint64_t number) {
    engine.forget(number);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ticks_.erase(number);
      if (!ticks_.empty()) return;
    }
    ticker_.stop();
    engine.stop();
  }

  Segment segment;
  Remote remote;
  Rings rings;
  Engine engine;  // it uses the rank numbers of the whole group
  const std::shared_ptr<ThreadPool> crew = std::make_shared<ThreadPool>();  // for started collectives

 private:
  void tick() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [number, tick] : ticks_) tick();
  }

  std::mutex mutex_;
  std::unordered_map<uint64_t, std::function<void()>> ticks_;  // by number of the group
  Ticker ticker_{std::chrono::milliseconds(8), [this] { tick(); }};  // each tick interrupts a rank for 20 us
};

}  // namespace fl
