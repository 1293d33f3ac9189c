// Predicted durations of algorithms, from which ranks choose one. All ranks know the arguments, and the numbers
// are integers, so all ranks choose the same. See docs/algorithms.md.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace fl {

// The LogGP model (Alexandrov et al., 1995), in nanoseconds. A message of k bytes arrives L + 2 o after the sender
// has sent its last byte. The sender can send another message after max(g, k G). The functions return the cost of
// an algorithm: the time until the root has sent, as it may call again, plus the time until all ranks have the data.
struct LogGP {
  int64_t hop, gap, per_kilobyte;  // L + 2 o, g, 1024 G

  constexpr int64_t occupies(size_t bytes) const {
    return std::max(gap, static_cast<int64_t>(bytes) * per_kilobyte / 1024);
  }

  // The root sends to each of the other `ranks` - 1 ranks.
  constexpr int64_t direct(int ranks, size_t bytes) const { return 2 * (ranks - 1) * occupies(bytes) + hop; }

  // Binomial tree: each rank sends to the roots of its subtrees, the largest first.
  constexpr int64_t tree(int ranks, size_t bytes) const {
    int sends = 0;
    while (1 << sends < ranks) ++sends;
    return sends * occupies(bytes) + end_of_tree(ranks, bytes);
  }

 private:
  // Time until the last rank has the data. The first subtree has the ranks from number `half` on.
  constexpr int64_t end_of_tree(int ranks, size_t bytes) const {
    if (ranks == 1) return 0;
    int half = 1;
    while (2 * half < ranks) half *= 2;
    return occupies(bytes) + std::max(end_of_tree(half, bytes), hop + end_of_tree(ranks - half, bytes));
  }
};

// Between hosts with 1 Gbit/s; benchmarks/loggp.py measures the constants.
constexpr LogGP kEthernet{58000, 2000, 9000};

// The binomial tree with the root `root`: rank root + v receives from root + v without the lowest bit of v.
struct Tree {
  int ranks, root;

  int parent(int rank) const {
    const int v = position(rank);
    return (root + (v & (v - 1))) % ranks;
  }
  // Call visit(child) for each child of `rank`, in decreasing order of the sizes of their subtrees.
  template <typename Visit>
  void for_each_child(int rank, Visit visit) const {
    const int v = position(rank);
    for (int distance = 1 << 29; distance > 0; distance /= 2) {
      if (v % (2 * distance) == 0 && v + distance < ranks) visit((root + v + distance) % ranks);
    }
  }

 private:
  int position(int rank) const { return (rank - root + ranks) % ranks; }
};

}  // namespace fl
