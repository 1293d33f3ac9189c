// The calls of each rank with their expected results, created in advance so that ranks run freely.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../../csrc/common/abi.h"

namespace stress {

// Parameters for choosing calls: number of ranks, and sizes at which a library changes its method.
struct Shape {
  int ranks;
  size_t inline_bytes;  // bytes of a collective that travel with the call
  size_t eager_bytes;  // bytes of a message that the sender need not wait for
  size_t chunk_bytes, piece_bytes;
  std::vector<size_t> strides;  // of regions
};

using Block = std::shared_ptr<const std::vector<char>>;
Block block(std::vector<char> bytes);

enum class How { kRun, kStart, kInTwoSteps, kExchange };

// The output buffer of a gather.
enum class Room { kNone, kFits, kDoesNotFit };

struct Step {
  fl_signature signature{};
  int peer = -1;
  How how = How::kRun;  // consecutive steps with kExchange form one exchange
  bool wait = true;  // wait at once for a started call
  int region = -1;  // region of the data; -1: separate memory
  size_t offset = 0;          // bytes, in the region or from an aligned address
  int adds = -1, drops = -1;  // regions to add or drop; then there is no call
  Block data;  // before the call; null: no data
  Block data_after;           // null: unchanged
  Block output_after;  // of the output or the gathered data; null: no output
  size_t output_bytes = 0;
  bool gathers = false;  // the library allocates the output
  Room room = Room::kNone;
  std::shared_ptr<const std::vector<int64_t>> sections;  // bytes, for the uneven verbs
  std::vector<Block> from;  // by rank, for receives from any rank: possible data
  fl_status status = FL_OK;
  std::vector<fl_signature> seen;  // expected with FL_MISMATCH; sequence 0: not checked
  bool may_run_ahead = false;  // the call passes a site
  // A mismatch that a rank may raise later. `differs`: the call itself; `may_differ`: a call that may raise
  // it; `tells`: the last such call, by whose end it was raised.
  bool differs = false, may_differ = false, tells = false;
};

struct Script {
  explicit Script(int ranks) : steps(ranks) {}
  std::vector<std::vector<Step>> steps;  // by rank
};

// Seconds after which a wait counts as hanging.
constexpr double kForever = 100;

// A call with `count` elements in one dimension: a sum without scaling.
inline fl_signature signature_of(int verb, int dtype, size_t itemsize, size_t count, int root = 0) {
  fl_signature s;
  std::memset(&s, 0, sizeof s);
  s.verb = verb;
  s.dtype = dtype;
  s.op = FL_SUM;
  s.root = root;
  s.scale = 1;
  s.count = s.shape[0] = static_cast<int64_t>(count);
  s.itemsize = static_cast<int>(itemsize);
  s.ndim = 1;
  return s;
}

// Reduce a signature to verb and root (FL_ANY).
inline void forget(fl_signature& signature) {
  const fl_signature full = signature;
  std::memset(&signature, 0, sizeof signature);
  signature.verb = full.verb;
  signature.root = full.root;
  signature.part_of = full.part_of;
  signature.ndim = FL_ANY;
}

}  // namespace stress
