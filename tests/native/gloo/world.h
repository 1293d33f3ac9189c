// Ranks of a Gloo group as threads of this process, using only the C ABI.
#pragma once

#include "../../../csrc/gloo/abi.h"
#include "../player.h"
#include "../random.h"
#include "../ranks.h"

namespace stress {

using Array = std::vector<uint32_t>;

// One rank, which checks the results of its calls.
class Rank {
 public:
  Rank(int rank, int size) : rank(rank), size(size) {}
  ~Rank() { close(); }
  Rank(const Rank&) = delete;
  // Return this rank of a subgroup.
  Rank part(const std::vector<int>& ranks, uint64_t number) const;

  void create();
  std::vector<char> address();
  void connect(const std::vector<char>& addresses, bool lazily);
  void close();

  // Run or start an operation: fl_run.
  fl_op* run(const fl_signature& signature, void* data, void* output, int peer, bool async);

  // Functions that a Player calls. There are no regions and no calls in two steps.
  fl::Handle run(const fl::Request& call) { return called(call, 0); }
  fl::Handle start(const fl::Request& call) { return called(call, 1); }
  std::vector<fl::Handle> exchange(const fl_message* messages, int count, double seconds, bool async);
  bool begin(const fl_signature&, const void*, double, const fl_site*) { return false; }
  int ready(int) { return 0; }
  std::shared_ptr<fl::Operation> finish(const fl_signature&, void*, void*) { return nullptr; }
  void* add_region(const std::shared_ptr<fl::Mapping>&, size_t) { return nullptr; }
  bool drop_region(const void*) { return true; }
  void play(const Script& script);

  const int rank, size;
  double seconds = 60;

 private:
  Rank(int rank, int size, fl_group* group) : rank(rank), size(size), group_(group) {}
  fl::Handle called(const fl::Request& call, int async);

  fl_group* group_ = nullptr;
};

template <>
inline constexpr bool waits_for_all<Rank> = false;

// Run `play(rank)` for the ranks of a world, each on a thread.
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

// Wait for an operation, free it, and return its status; null is success.
fl_status ended(fl_op* op);
void check_ok(fl_op* op, const char* what);

// Messages to the next rank and from the previous one, with several tags, each on separate threads.
void play_threads(Rank& rank);
// Subgroups, each with a script, run concurrently with each other and with the whole group, which continues
// after their end.
struct Part {
  std::vector<int> ranks;
  Script script;
  uint64_t number;
};
void play_parts(Rank& rank, const std::vector<Part>& parts, const Script& beside);
// The end of a world: one rank leaves or is late while other ranks wait for it.
void play_the_end(Rank& rank, Random random);

}  // namespace stress
