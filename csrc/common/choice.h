// Selection of the fastest copy path between ranks, by measurement.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace fl {

enum CopyPath {
  kThroughCaches,  // ordinary stores into shared memory, then a copy out of it
  kPastCaches,     // streamed stores into shared memory
  kDirectly,       // the kernel reads the other process's memory
  kPaths,
};

// Measured cost of each path for one rank, in picoseconds per byte; 0: not measured.
struct Costs {
  std::array<uint16_t, kPaths> of;

  // Raise each cost to the cost of `other`.
  void raise(const Costs& other) {
    for (int path = 0; path < kPaths; ++path) of[path] = std::max(of[path], other.of[path]);
  }
};

// Choice of a copy path for each verb and size class.
//
// The fastest path depends on the cores of the ranks, on the size, and on the core that wrote the array
// (docs/shared-memory.md). Therefore each rank measures the cost of every path and announces the costs with
// its calls. All ranks use the path whose slowest rank has the lowest cost.
class Choice {
  struct History;

 public:
  // `calls`: initial value of the call count of every verb and size class.
  explicit Choice(int verbs, uint32_t calls = 0) : histories_(verbs) {
    for (auto& sizes : histories_) sizes.fill(History{calls, kPaths, {}});
  }

  struct Trial {
    CopyPath path = kPastCaches;
    bool counts = false;
    History* history = nullptr;
    size_t bytes = 1;
    std::chrono::steady_clock::time_point started{};
  };

  // Return the measured costs, which this rank announces with a call of `verb` for `bytes` bytes.
  Costs costs(int verb, size_t bytes) const {
    const History& history = histories_[verb][size_class(bytes)];
    Costs costs;
    for (int path = 0; path < kPaths; ++path) {
      costs.of[path] = static_cast<uint16_t>(std::min(65535.0, 1e12 * history.cost[path]));
    }
    return costs;
  }

  // Choose one of the paths 0 to `paths` - 1. `bytes` is equal on all ranks. `slowest` has the highest of
  // the costs that all ranks have announced with this call. A rank that only writes returns early and measures
  // less.
  Trial begin(int verb, size_t bytes, int paths, const Costs& slowest) {
    History& history = histories_[verb][size_class(bytes)];
    const uint32_t call = history.calls++;
    const int best = best_path(paths, slowest);
    int next = next_path(best, call, paths);
    const bool is_hopeless = call >= 2 * kTryEvery && slowest.of[next] > kHopeless * slowest.of[best];
    if (is_hopeless && call / kTryEvery % kTryHopeless != 0) next = best;
    // The first call on another path is not measured: the previous path determined the caches' contents.
    const bool counts = std::exchange(history.last, next) == next;
    return {static_cast<CopyPath>(next), counts, &history, bytes, Clock::now()};
  }

  // begin() for a transfer if a single rank chooses the path.
  Trial begin_alone(int verb, size_t bytes, int paths) {
    return begin(verb, bytes, paths, costs(verb, bytes));
  }

  // `more`: seconds per byte that the transfer costs another rank.
  void end(const Trial& trial, double more = 0) {
    if (!trial.counts) return;
    const double seconds = std::chrono::duration<double>(Clock::now() - trial.started).count();
    double& cost = trial.history->cost[trial.path];
    const double now = seconds / static_cast<double>(trial.bytes) + more;
    // If the call was faster than `cost`, nothing disturbed it: give it a large weight. If it was much
    // slower, something probably disturbed it: raise `cost` by at most 1/16. Otherwise one slow call could
    // end the use of the best path, and a path that is not used is rarely measured.
    if (cost == 0 || cost > 2 * now) cost = now;
    cost += now < cost ? 0.75 * (now - cost) : std::min(0.25 * (now - cost), cost / 16);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr uint32_t kFirst = 9;  // initial calls, which try the paths in turn
  static constexpr uint32_t kRun = 3;    // consecutive calls on a path under trial
  // Calls from trial to trial. Trials also begin at calls 16, 32, 64 and 128, because other processes often
  // disturb all first calls.
  static constexpr uint32_t kTryEvery = 256;
  // A path that costs more than kHopeless times the best path gets only every kTryHopeless-th of its trials.
  static constexpr int kHopeless = 2;
  static constexpr uint32_t kTryHopeless = 9;  // odd, because trials alternate between the two other paths

  struct History {
    uint32_t calls;
    int last;                         // path of the last call; kPaths: no call yet
    std::array<double, kPaths> cost;  // seconds per byte; 0: not measured
  };

  static size_t size_class(size_t bytes) {
    return bytes == 0 ? 0 : 63 - static_cast<size_t>(__builtin_clzll(bytes));
  }

  static int best_path(int paths, const Costs& slowest) {
    int best = kPastCaches;
    for (int path = 0; path < paths; ++path) {
      if (slowest.of[path] != 0 && (slowest.of[best] == 0 || slowest.of[path] < slowest.of[best])) best = path;
    }
    return best;
  }

  // Return the best path, or another path if call number `call` is a trial of that path.
  static int next_path(int best, uint32_t call, int paths) {
    if (call < kFirst) return static_cast<int>((call / kRun + kPastCaches) % paths);
    const auto doublings = 31 - static_cast<uint32_t>(__builtin_clz(call));
    const uint32_t every = std::min(1u << doublings, kTryEvery);
    if (call % every >= kRun) return best;
    const uint32_t turn = call < kTryEvery ? doublings : call / every;
    return static_cast<int>((best + 1 + turn % (paths - 1)) % paths);
  }

  std::vector<std::array<History, 64>> histories_;
};

}  // namespace fl
