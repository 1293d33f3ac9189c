// How ranks enter a call, and what they know of each other's memory.
#include "collectives.h"

#include <algorithm>
#include <cstring>

#include "../common/signature.h"
#include "streaming.h"

namespace fl {
namespace {

constexpr uint32_t kVote = 1u << 31;  // see choice.h
constexpr uint32_t kAny = 1u << 30;   // only verb and root are known

uint32_t kind_of(const fl_signature& s) {
  const uint32_t verb = static_cast<uint32_t>(s.verb) << 16;
  if (s.ndim == FL_ANY) return verb | kAny;
  return verb | static_cast<uint32_t>(s.dtype) << 8 | static_cast<uint32_t>(s.op);
}

// FNV-1a over what same_call compares and the first line of a Call has no room for.
uint64_t hash_of_shape(const fl_signature& s) {
  uint64_t hash = 1469598103934665603u ^ static_cast<uint64_t>(s.ndim);
  const int dims = std::min(s.ndim, 8);
  for (int d = first_dimension_is_free(s.verb) ? 1 : 0; d < dims; ++d) {
    hash = (hash ^ static_cast<uint64_t>(s.shape[d])) * 1099511628211u;
  }
  return hash;
}

// What same_call says, of the first lines alone.
bool alike(const Call& a, const Call& b, bool free) {
  if (((a.kind | b.kind) & kAny) != 0) {
    return ((a.kind ^ b.kind) >> 16 & 0xff) == 0 && a.root == b.root;
  }
  return (a.kind | kVote) == (b.kind | kVote) && a.root == b.root && a.scale == b.scale &&
         a.shape == b.shape && (free || a.count == b.count);
}

}  // namespace

Collectives::Collectives(Segment& segment, Peers& peers, int rank, int size)
    : segment_(segment),
      peers_(peers),
      watch_(peers, {}, 0, nullptr),
      rank_(rank),
      size_(size),
      from_(size) {}

void Collectives::begin(double seconds, InterruptCheck interrupt) {
  watch_ = Watch(peers_, Concern{-1, calls_ + 1}, seconds, interrupt);
}

// Tell the others what this rank calls, with `inline_bytes` of data, and hear the same of them.
void Collectives::enter(const fl_signature& mine, const void* data, size_t inline_bytes) {
  tell(mine, data, inline_bytes);
  hear(mine);
}

// Two sets of calls are enough: who is in call k has read everything of call k-2.
void Collectives::tell(const fl_signature& mine, const void* data, size_t inline_bytes) {
  const uint32_t number = ++calls_;
  Call& call = segment_.block(rank_).calls[number % 2];
  call.kind = kind_of(mine);
  call.root = mine.root;
  call.count = mine.count;
  call.scale = mine.scale;
  call.shape = hash_of_shape(mine);
  call.place = inline_bytes > 0 ? 0 : place_of(data);
  if (mine.verb == FL_ALL_REDUCE && inline_bytes == 0) {
    const size_t bytes = static_cast<size_t>(mine.count) * mine.itemsize;
    if (choice_.vote(bytes, call.place != 0)) call.kind |= kVote;
  }
  call.signature = mine;
  call.signature.sequence = sequence_of(number);
  if (inline_bytes > 0) {
    stream_copy(inline_bytes <= kTinyBytes ? call.tiny : call.payload, data, inline_bytes);
  }
  call.number.raise(number);
}

void Collectives::hear(const fl_signature& mine) {
  const Call& call = call_of(rank_);
  bool same = mine.ndim != FL_ANY;
  const bool free = first_dimension_is_free(mine.verb);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    Call& theirs = segment_.block(r).calls[calls_ % 2];
    watch_.wait(theirs.number, calls_, r);
    same = same && alike(call, theirs, free);
  }
  if (mine.verb == FL_SCATTER) same = same && (call_of(mine.root).kind & kAny) == 0;
  if (!same && !all_call_the_same()) throw Mismatch();
}

// What all ranks find in the same way, also one that cannot be the measure of the others. A root
// that knows nothing is as wrong as one that calls something else.
bool Collectives::all_call_the_same() const {
  const Seen seen = signatures();
  const fl_signature& mine = seen[rank_];
  if (!all_same(seen.data(), size_)) return false;
  return mine.verb != FL_SCATTER || seen[mine.root].ndim != FL_ANY;
}

const char* Collectives::inline_data(int rank, size_t bytes) const {
  const Call& call = call_of(rank);
  return bytes <= kTinyBytes ? call.tiny : call.payload;
}

int Collectives::votes() const {
  int votes = 0;
  for (int r = 0; r < size_; ++r) votes += (call_of(r).kind & kVote) != 0 ? 1 : 0;
  return votes;
}

Collectives::Seen Collectives::signatures() const {
  Seen seen(size_);
  for (int r = 0; r < size_; ++r) {
    if (call_of(r).number.value() == calls_) seen[r] = call_of(r).signature;
  }
  return seen;
}

void Collectives::barrier(const fl_signature& mine) { enter(mine, nullptr, 0); }

// Arrays in shared memory ---------------------------------------------------------------------

void* Collectives::add_region(std::shared_ptr<Mapping> mapping, size_t stride) {
  char* mine = mapping->data() + rank_ * stride;
  regions_.push_back({std::move(mapping), stride});
  return mine;
}

void Collectives::drop_region(const void* array) {
  const uint64_t place = place_of(array);
  if (place != 0) regions_[(place >> 44) - 1].mapping = nullptr;
}

// Region number (from 1) and offset in this rank's part of it.
uint64_t Collectives::place_of(const void* data) const {
  const char* at = static_cast<const char*>(data);
  for (size_t i = 0; i < regions_.size(); ++i) {
    if (regions_[i].mapping == nullptr) continue;
    const char* mine = regions_[i].mapping->data() + rank_ * regions_[i].stride;
    if (at >= mine && at < mine + regions_[i].stride) {
      return static_cast<uint64_t>(i + 1) << 44 | static_cast<uint64_t>(at - mine);
    }
  }
  return 0;
}

bool Collectives::all_in_one_place() const {
  const uint64_t place = call_of(rank_).place;
  if (place == 0) return false;
  for (int r = 0; r < size_; ++r) {
    if (call_of(r).place != place) return false;
  }
  return true;
}

char* Collectives::in_region(int rank) const {
  const uint64_t place = call_of(rank_).place;
  const Region& region = regions_[(place >> 44) - 1];
  return region.mapping->data() + rank * region.stride + (place & ((uint64_t{1} << 44) - 1));
}

}  // namespace fl
