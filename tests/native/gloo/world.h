// Ranks of a Gloo group as threads of this process, through the C ABI alone.
#pragma once

#include "../../../csrc/gloo/abi.h"
#include "../player.h"
#include "../random.h"
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

  // What a Player calls. There are no regions here, and nothing is called in two steps.
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

// Messages to the next rank and from the one before, with several tags, each on threads of its own.
void play_threads(Rank& rank);
// Groups of some ranks, each with its script, beside each other and the whole, which goes on whatever becomes of them.
struct Part {
  std::vector<int> ranks;
  Script script;
  uint64_t number;
};
void play_parts(Rank& rank, const std::vector<Part>& parts, const Script& beside);
// How a world ends: one rank leaves, or is late, while the others wait for it.
void play_the_end(Rank& rank, Random random);

}  // namespace stress
