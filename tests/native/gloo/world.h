// Ranks of a Gloo group as threads of this process, through the C ABI alone.
#pragma once

#include "../../../csrc/gloo/abi.h"
#include "../check.h"
#include "../ranks.h"

namespace stress {

using Array = std::vector<uint32_t>;

// One rank, which checks that what it calls ends as it should.
class Rank {
 public:
  Rank(int rank, int size) : rank(rank), size(size) {}
  ~Rank() { close(); }
  Rank(const Rank&) = delete;
  // That of a group of some ranks, this one among them.
  Rank part(const std::vector<int>& ranks, uint64_t number) const;

  void create();
  std::vector<char> address();
  void connect(const std::vector<char>& addresses, bool lazily);
  void close();

  // Run an operation here, or begin it: fl_run.
  fl_op* run(const fl_signature& signature, void* data, void* output, int peer, bool async);
  void exchange(const std::vector<fl_message>& messages, bool async, std::vector<fl_op*>& results);

  const int rank, size;
  double seconds = 60;

 private:
  Rank(int rank, int size, fl_group* group) : rank(rank), size(size), group_(group) {}

  fl_group* group_ = nullptr;
};

// What `ranks` of a world do, each on a thread.
template <typename Play>
void in_world(int ranks, bool lazily, Play play) {
  std::vector<std::vector<char>> addresses(ranks);
  Latch told(ranks);
  in_threads(ranks, [&](int r) {
    Rank rank(r, ranks);
    rank.create();
    addresses[r] = rank.address();
    told.count_down();
    told.wait();
    std::vector<char> all;
    for (const auto& theirs : addresses) all.insert(all.end(), theirs.begin(), theirs.end());
    rank.connect(all, lazily);
    play(rank);
  });
}

fl_signature signature_of(int verb, size_t count, int root);

// Wait for an operation, free it, and return how it ended; null has ended well.
fl_status ended(fl_op* op);
void check_ok(fl_op* op, const char* what);

// What rank `rank` has at place `i` in step `step`.
inline uint32_t value(uint64_t step, int rank, size_t i) {
  return static_cast<uint32_t>((step * 31 + rank * 7 + i + 1) * 2654435761u);
}
Array values(uint64_t step, int rank, size_t count);

}  // namespace stress
