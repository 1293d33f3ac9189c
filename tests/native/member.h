// A rank of a test that ends in a failure.
#pragma once

#include "../../csrc/common/capi.h"
#include "check.h"
#include "ranks.h"
#include "world.h"

namespace stress {

struct Outcome {
  fl_status status = FL_OK;
  std::vector<int> missing;
  std::string message;
};

inline Outcome outcome_of(const fl::Handle& handle) {
  if (handle == nullptr) return {};
  fl_status status;
  while ((status = handle->wait(1.0)) == FL_PENDING) {
  }
  return {status, handle->outcome().missing, handle->outcome().message};
}

// A group and one array, for calls of all_reduce.
struct Member {
  Member(World& world, int rank, size_t floats)
      : rank(rank),
        group(world.join(rank)),
        signature(signature_of(FL_ALL_REDUCE, FL_FLOAT32, sizeof(float), floats)),
        data(floats) {}

  Outcome call(double seconds = kForever) {
    return outcome_of(group->run({signature, data.data(), nullptr, -1, seconds}));
  }

  // The signature of a message with that array.
  fl_signature message(int verb, int tag) const {
    fl_signature s = signature;
    s.verb = verb;
    s.root = tag;
    return s;
  }
  Outcome run(int verb, int peer, int tag, double seconds = kForever) {
    return outcome_of(group->run({message(verb, tag), data.data(), nullptr, peer, seconds}));
  }
  fl::Handle start(int verb, int peer, int tag, double seconds = kForever) {
    return group->start({message(verb, tag), data.data(), nullptr, peer, seconds});
  }

  void expect(const Outcome& outcome, fl_status status, const std::vector<int>& missing) const {
    // Later calls name the ranks of the first failure, which may differ between ranks.
    const bool right = status == FL_CLOSED || outcome.missing == missing;
    if (outcome.status == status && right) return;
    std::string ranks;
    for (int r : outcome.missing) ranks += " " + std::to_string(r);
    fail("rank " + std::to_string(rank) + ": status " + std::to_string(outcome.status) +
         " instead of " + std::to_string(status) + ", about ranks" + ranks + ": " +
         outcome.message);
  }

  int rank;
  std::unique_ptr<fl::ShmGroup> group;
  fl_signature signature;
  std::vector<float> data;
};

// Run `work(member, rank)` for each rank of a new world, in threads.
template <typename Work>
void in_world(int ranks, size_t floats, const std::string& what, Work work) {
  situation() = what;
  World world(ranks, 0, {});
  in_threads(ranks, [&](int rank) {
    Member me(world, rank, floats);
    work(me, rank);
  });
}

// "rank R of N", for tests about one rank.
inline std::string rank_of(int rank, int ranks) {
  return "rank " + std::to_string(rank) + " of " + std::to_string(ranks);
}

}  // namespace stress
