// Predicted durations of algorithms, from which ranks choose one. All ranks know the arguments, and the numbers
// are integers, so all ranks choose the same. See docs/algorithms.md.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

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

  // Binomial tree: the root sends to the roots of subtrees, the largest first, and they do the same. The root can
  // call again when it has sent (`sent`), and the last rank has the data at `end`.
  constexpr int64_t tree(int ranks, size_t bytes) const {
    const auto [sent, end] = times_of_tree(ranks, bytes);
    return sent + end;
  }

 private:
  constexpr std::pair<int64_t, int64_t> times_of_tree(int ranks, size_t bytes) const {
    int64_t sent = 0, end = 0;
    int distance = 1;
    while (2 * distance < ranks) distance *= 2;
    for (; distance > 0 && ranks > 1; distance /= 2) {
      sent += occupies(bytes);
      end = std::max(end, sent + hop + times_of_tree(std::min(distance, ranks - distance), bytes).second);
    }
    return {sent, end};
  }
};

// Between hosts with 1 Gbit/s; benchmarks/loggp.py measures the constants.
constexpr LogGP kEthernet{53000, 7000, 9000};

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
    int distance = v & -v;
    for (distance = v == 0 ? 1 : distance; v == 0 && distance < ranks;) distance *= 2;
    while ((distance /= 2) > 0) {
      if (v + distance < ranks) visit((root + v + distance) % ranks);
    }
  }

 private:
  int position(int rank) const { return (rank - root + ranks) % ranks; }
};

}  // namespace fl
