// What each rank calls, and what must come of it; made beforehand, so that ranks run freely.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../../csrc/common/abi.h"

namespace stress {

// What calls are chosen by: how many ranks there are, and where a library begins to do things in another way.
struct Shape {
  int ranks;
  size_t inline_bytes;  // of a collective, which travel with the call
  size_t eager_bytes;   // of a message, which the sender need not wait for
  size_t chunk_bytes, piece_bytes;
  std::vector<size_t> strides;  // of regions
};

using Block = std::shared_ptr<const std::vector<char>>;
Block block(std::vector<char> bytes);

enum class How { kRun, kStart, kInTwoSteps, kExchange };

// What a gather is given for its result.
enum class Room { kNone, kFits, kDoesNotFit };

struct Step {
  fl_signature signature{};
  int peer = -1;
  How how = How::kRun;        // steps with kExchange that follow each other are one exchange
  bool wait = true;           // at once, for what was started
  int region = -1;            // the data lies in this one; else in memory of its own
  size_t offset = 0;          // bytes, in the region or from an aligned address
  int adds = -1, drops = -1;  // regions, before the call; then there is no call
  Block data;                 // before the call; null: none
  Block data_after;           // null: unchanged
  Block output_after;         // of the output or of what was gathered; null: none
  size_t output_bytes = 0;
  bool gathers = false;       // the library makes the output
  Room room = Room::kNone;
  std::shared_ptr<const std::vector<int64_t>> sections;  // bytes, of the uneven verbs
  std::vector<Block> from;  // by rank, of a receive from any: what it may get; empty: it knows
  fl_status status = FL_OK;
  std::vector<fl_signature> seen;  // with FL_MISMATCH; sequence 0: not this rank's business
  bool may_run_ahead = false;      // it says where it calls
  // Of a mismatch that a rank may hear of later: the call itself, those after it in which this may be, and
  // the last of these, by the end of which it has.
  bool differs = false, may_differ = false, tells = false;
};

struct Script {
  explicit Script(int ranks) : steps(ranks) {}
  std::vector<std::vector<Step>> steps;  // by rank
};

// Seconds after which a wait means that something hangs.
constexpr double kForever = 100;

std::string describe(const fl_signature& signature);

// A call of `count` elements in one dimension: a sum without a scale, unless it is changed.
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

// What a rank calls that knows verb and root alone.
void forget(fl_signature& signature);

}  // namespace stress
