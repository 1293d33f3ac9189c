// How bytes go from rank to rank: which way is the fastest here and now.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace fl {

enum Way {
  kThroughCaches,  // into shared memory by ordinary stores, and out of it
  kPastCaches,     // into it by streamed stores
  kDirectly,       // out of the other's own memory, by the kernel
  kWays,
};

// What each way has cost a rank, in picoseconds per byte; 0: not known.
struct Costs {
  std::array<uint16_t, kWays> of;
};

// Where cores are near each other and chunks many, ordinary stores are up to twice as fast; where
// they are far apart, or lines still lie in the reader's cache, streaming is up to ten times as
// fast. Reading directly saves one of two copies, but waits for each line that the other has just
// written. The best one depends on where the scheduler, and a hypervisor, has put the ranks, on the size, and
// on who wrote the array when. So it is measured: for every size class each rank keeps what the ways have
// cost, and announces it with its calls; all go by the cost of the slowest rank. Now and then a few calls try
// another way.
class Choice {
  struct Kind;

 public:
  // Of each way, what it costs the slowest rank: one that only writes has left before the others end.
  class Slowest {
   public:
    void add(const Costs& costs) {
      for (int way = 0; way < kWays; ++way) of_[way] = std::max(of_[way], costs.of[way]);
    }
    int operator[](int way) const { return of_[way]; }

   private:
    std::array<uint16_t, kWays> of_{};
  };

  // Verbs are numbered from 0; `calls`: as if there had been so many of each kind.
  explicit Choice(int verbs, uint32_t calls = 0) : kinds_(verbs) {
    for (auto& sizes : kinds_) sizes.fill(Kind{calls, kWays, {}});
  }

  // A call that goes one way, and is timed.
  struct Trial {
    Way way = kPastCaches;
    bool counts = false;
    Kind* kind = nullptr;
    size_t bytes = 1;
    std::chrono::steady_clock::time_point started{};
  };

  // What this rank announces with a call of `verb`.
  Costs costs(int verb, size_t bytes) const {
    const Kind& kind = kinds_[verb][size_class(bytes)];
    Costs costs;
    for (int way = 0; way < kWays; ++way) {
      costs.of[way] = static_cast<uint16_t>(std::min(65535.0, 1e12 * kind.cost[way]));
    }
    return costs;
  }

  // Choose among the first `ways` for a call whose size is the same on every rank; `slowest` is made
  // of all costs announced with it.
  Trial begin(int verb, size_t bytes, int ways, const Slowest& slowest) {
    Kind& kind = kinds_[verb][size_class(bytes)];
    const uint32_t call = kind.calls++;
    const int best = best_of(ways, slowest);
    int next = next_of(best, call, ways);
    const bool is_hopeless = call >= kFirst && slowest[next] > kHopeless * slowest[best];
    if (is_hopeless && call / kTryEvery % kTryHopeless != 0) next = best;
    // The first call after another way finds the caches as that has left them.
    const bool counts = std::exchange(kind.last, next) == next;
    return {static_cast<Way>(next), counts, &kind, bytes, Clock::now()};
  }

  void end(const Trial& trial) {
    if (!trial.counts) return;
    const double seconds = std::chrono::duration<double>(Clock::now() - trial.started).count();
    double& cost = trial.kind->cost[trial.way];
    const double now = seconds / static_cast<double>(trial.bytes);
    // A call that took less time than before was not disturbed, and counts more. One that took much more
    // probably was: by itself it must not make another way the best, which would be gone for many calls.
    if (cost == 0) cost = now;
    cost += now < cost ? 0.75 * (now - cost) : std::min(0.25 * (now - cost), cost / 16);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr uint32_t kFirst = 9;  // calls that take turns, to begin with
  static constexpr uint32_t kRun = 3;    // calls in a row that go a way which is tried
  static constexpr uint32_t kTryEvery = 256;
  // A way that takes so many times as long is tried again only now and then.
  static constexpr int kHopeless = 3;
  static constexpr uint32_t kTryHopeless = 9;  // odd: each in its turn

  struct Kind {
    uint32_t calls;
    int last;  // the way of the last one; kWays: none
    std::array<double, kWays> cost;  // seconds per byte; 0: not known
  };

  static size_t size_class(size_t bytes) {
    return bytes == 0 ? 0 : 63 - static_cast<size_t>(__builtin_clzll(bytes));
  }

  static int best_of(int ways, const Slowest& slowest) {
    int best = kPastCaches;
    for (int way = 0; way < ways; ++way) {
      if (slowest[way] != 0 && (slowest[best] == 0 || slowest[way] < slowest[best])) best = way;
    }
    return best;
  }

  // The best way, or the one whose turn it is to be tried.
  static int next_of(int best, uint32_t call, int ways) {
    if (call < kFirst) return static_cast<int>((call / kRun + kPastCaches) % ways);
    if (call % kTryEvery >= kRun) return best;
    return static_cast<int>((best + 1 + call / kTryEvery % (ways - 1)) % ways);
  }

  std::vector<std::array<Kind, 64>> kinds_;
};

}  // namespace fl
