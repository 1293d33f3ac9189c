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
  // A group with a function tick(). After activate(), tick() is called every millisecond for some time.
  class Ticking {
   public:
    virtual void tick() = 0;

   protected:
    ~Ticking() = default;
  };

  Family(Mapping mapping, int rank, int size)
      : segment(std::move(mapping), size), remote(segment, rank, size), rings(segment, remote, rank, size),
        engine(rings, size) {}
  Family(const Family&) = delete;

  void join(Ticking& group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    groups_.push_back(&group);
  }
  // Start the ticks. Throws if the thread cannot be created.
  void activate() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ticker_.activate();
  }
  // Remove a group. Its tick() is not called again. If it was the last group, all threads stop.
  void leave(Ticking& group, uint64_t number) {
    engine.forget(number);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      groups_.erase(std::remove(groups_.begin(), groups_.end(), &group), groups_.end());
      if (!groups_.empty()) return;
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
    for (Ticking* group : groups_) group->tick();
  }

  std::mutex mutex_;
  std::vector<Ticking*> groups_;
  Ticker ticker_{[this] { tick(); }};
};

}  // namespace fl
