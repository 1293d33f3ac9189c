// How to write what the others will read: through the caches or past them.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace fl {

// Where cores are near each other and chunks many, ordinary stores are up to twice as fast; where
// they are far apart, or lines still lie in the reader's cache, streaming is up to five times as
// fast. Which it is depends on where the scheduler, and a hypervisor, has put the ranks, and
// changes while they run. So it is measured: for every size class each rank keeps what both ways
// cost and votes with its next call of that class; the call after it goes by the votes, which all
// ranks have seen. Now and then a call tries the other way.
class Choice {
 public:
  // For a call of `bytes`, in place or through the slots; the same on every rank.
  void begin(size_t bytes, bool in_place, uint32_t call) {
    kind_ = &kinds_[in_place ? 1 : 0][size_class(bytes)];
    bytes_ = bytes;
    const bool tries_other = kind_->calls < kFirst ? kind_->calls % 2 != 0 : call % kTryEvery == 0;
    streams_ = kind_->streams != tries_other;
    ++kind_->calls;
    started_ = Clock::now();
  }

  bool streams() const { return streams_; }

  void end() {
    const double seconds = std::chrono::duration<double>(Clock::now() - started_).count();
    double& cost = kind_->cost[streams_ ? 1 : 0];
    const double now = seconds / static_cast<double>(bytes_);
    // What took less time than before was not disturbed, and counts more.
    const double weight = cost == 0 ? 1.0 : now < cost ? 0.75 : 0.25;
    cost += weight * (now - cost);
  }

  // What this rank says with a call of `bytes`.
  bool vote(size_t bytes, bool in_place) const {
    const Kind& kind = kinds_[in_place ? 1 : 0][size_class(bytes)];
    if (kind.cost[0] == 0 || kind.cost[1] == 0) return kind.streams;
    return kind.cost[1] <= kind.cost[0];
  }

  // What the ranks have said with the call that has just ended.
  void count(int votes, int ranks) { kind_->streams = 2 * votes >= ranks; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr uint32_t kTryEvery = 128;
  static constexpr uint32_t kFirst = 8;  // calls that take turns, to begin with

  struct Kind {
    bool streams = true;
    uint32_t calls = 0;
    double cost[2] = {0, 0};  // seconds per byte: through the caches, past them
  };

  static size_t size_class(size_t bytes) {
    return bytes == 0 ? 0 : 63 - static_cast<size_t>(__builtin_clzll(bytes));
  }

  std::array<std::array<Kind, 64>, 2> kinds_;
  Kind* kind_ = &kinds_[0][0];
  size_t bytes_ = 1;
  bool streams_ = true;
  Clock::time_point started_;
};

}  // namespace fl
