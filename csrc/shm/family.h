// What a group of a host and the groups that are made of it have in common: the memory through which
// messages go, and their engine.
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
  // What a group does every millisecond for a while after it has called wind().
  class Ticking {
   public:
    virtual void tick() = 0;

   protected:
    ~Ticking() = default;
  };

  Family(Mapping mapping, int rank, int size)
      : segment(std::move(mapping), size),
        remote(segment, rank, size),
        rings(segment, remote, rank, size),
        engine(rings, size) {}
  Family(const Family&) = delete;

  void join(Ticking& group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    groups_.push_back(&group);
  }
  // Throws where no thread can be had.
  void wind() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ticker_.wind();
  }
  // A group that has joined goes: it does not tick any more, and with the last one nothing runs.
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
  Engine engine;  // ranks are those of the segment
  const std::shared_ptr<Crew> crew = std::make_shared<Crew>();  // for collectives that were started

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
