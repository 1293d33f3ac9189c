// How ranks enter a call, and what they know of each other's memory.
#include "collectives.h"

#include <algorithm>
#include <cstring>

#include "../common/signature.h"
#include "../common/copying.h"

namespace fl {
namespace {

// What a rank says with the kind of its call.
constexpr uint32_t kAny = 1u << 29;      // only verb and root are known
constexpr uint32_t kIsLarge = 1u << 30;  // its data does not come with it, but its address
constexpr uint32_t kCanRead = 1u << 31;  // it can read the memory of all others

// How long ranks that differ wait for each other's places.
constexpr double kAnnouncingSeconds = 5;

uint32_t kind_of(const fl_signature& s) {
  const uint32_t call = static_cast<uint32_t>(s.part_of) << 24 | static_cast<uint32_t>(s.verb) << 16;
  if (s.ndim == FL_ANY) return call | kAny;
  return call | static_cast<uint32_t>(s.dtype) << 8 | static_cast<uint32_t>(s.op);
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
    return ((a.kind ^ b.kind) >> 16 & 0x1fff) == 0 && a.root == b.root;
  }
  constexpr uint32_t kMayDiffer = kIsLarge | kCanRead;
  return (a.kind | kMayDiffer) == (b.kind | kMayDiffer) && a.root == b.root && a.scale == b.scale &&
         a.shape == b.shape && (free || a.count == b.count);
}

}  // namespace

Collectives::Collectives(Segment& segment, Peers& peers, Remote& remote, int rank, int size)
    : segment_(segment),
      peers_(peers),
      remote_(remote),
      watch_(peers, {}, 0, nullptr),
      rank_(rank),
      size_(size),
      from_(size),
      choice_(FL_VERBS) {}

void Collectives::begin(double seconds, InterruptCheck interrupt) {
  watch_ = Watch(peers_, Concern{-1, calls_ + 1}, seconds, interrupt);
}

void Collectives::go_on(double seconds, InterruptCheck interrupt) {
  watch_ = Watch(peers_, Concern{-1, calls_}, seconds, interrupt);
}

bool Collectives::travels_whole(const fl_signature& mine) const {
  if (is_compared(mine)) return true;
  if (mine.verb == FL_ALL_TO_ALL_UNEVEN || mine.verb == FL_REDUCE_SCATTER_UNEVEN) return false;
  const size_t parts = mine.verb == FL_SCATTER ? size_ : 1;
  return mine.ndim >= 0 && mine.count * mine.itemsize * parts <= kInlineBytes;
}

// How much of a verb's data travels with the call: nothing, or all that this rank has for others.
size_t Collectives::bytes_with_call(const fl_signature& mine) const {
  size_t bytes = static_cast<size_t>(mine.count) * mine.itemsize;
  const bool only_root = mine.verb == FL_BROADCAST || mine.verb == FL_SCATTER;
  if (mine.verb == FL_BARRIER || (only_root && rank_ != mine.root)) return 0;
  if (mine.verb == FL_SCATTER) bytes *= size_;
  return bytes <= kInlineBytes ? bytes : 0;
}

Progress Collectives::progress() const {
  bool complete = true;
  for (int r = 0; r < size_; ++r) {
    const Call& call = call_of(r);
    if (!call.number.reached(calls_)) return Progress::kAwaited;
    complete = complete && (call.kind & (kIsLarge | kAny)) != kIsLarge;
  }
  return complete ? Progress::kComplete : Progress::kCalled;
}

// Two sets of calls are enough: who is in call k has read everything of call k-2.
void Collectives::announce(const fl_signature& mine, const void* data, size_t inline_bytes) {
  const uint32_t number = ++calls_;
  Call& call = segment_.block(rank_).calls[number % 2];
  call.kind = kind_of(mine);
  call.root = mine.root;
  call.count = mine.count;
  call.scale = mine.scale;
  call.shape = hash_of_shape(mine);
  call.place = inline_bytes > 0 ? 0 : place_of(data);
  call.signature = mine;
  call.signature.sequence = sequence_of(number);
  call.called_at = coarse_now();
  if (inline_bytes > 0) {
    copy(inline_bytes <= kTinyBytes ? call.tiny : call.payload, data, inline_bytes);
  } else {
    announce_large(mine, data, call);
  }
  call.number.raise(number);
}

// Where the data is that does not come with a call, and what all need to choose its way. A rank that
// does not know the size of the whole announces it in any case.
void Collectives::announce_large(const fl_signature& mine, const void* data, Call& call) {
  if (is_compared(mine)) return;
  const bool knows = mine.ndim != FL_ANY && mine.verb != FL_ALL_TO_ALL_UNEVEN;
  size_t bytes = mine.ndim == FL_ANY ? 0 : static_cast<size_t>(mine.count) * mine.itemsize;
  if (mine.verb == FL_SCATTER) bytes *= size_;
  if (knows && bytes <= kInlineBytes) return;
  call.kind |= kIsLarge | (remote_.can_read_all() ? kCanRead : 0);
  call.large = {reinterpret_cast<uintptr_t>(data), choice_.costs(key_of(mine, call), bytes)};
}

// Under which costs are kept: in place they are others.
int Collectives::key_of(const fl_signature& mine, const Call& call) {
  return mine.verb == FL_ALL_REDUCE && call.place != 0 ? 0 : mine.verb;
}

void Collectives::receive_calls(const fl_signature& mine) {
  const Call& call = call_of(rank_);
  bool same = mine.ndim != FL_ANY;
  const bool free = first_dimension_is_free(mine.verb);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    Call& theirs = segment_.block(r).calls[calls_ % 2];
    watch_.wait(theirs.number, calls_, r);
    same = same && alike(call, theirs, free);
  }
  // All are in this call and have read that before it: its line is free for the next one.
  expect_to_write(&segment_.block(rank_).calls[(calls_ + 1) % 2]);
  if (root_must_know(mine.verb)) same = same && (call_of(mine.root).kind & kAny) == 0;
  if (!same && !all_call_the_same()) throw Mismatch();
}

// What all ranks find in the same way, also one that cannot be the measure of the others. A root
// that knows nothing is as wrong as one that calls something else.
bool Collectives::all_call_the_same() const {
  const auto seen = calls();
  const fl_signature& mine = seen[rank_];
  if (!all_same(seen.data(), size_)) return false;
  return !root_must_know(mine.verb) || seen[mine.root].ndim != FL_ANY;
}

const char* Collectives::inline_data(int rank, size_t bytes) const {
  const Call& call = call_of(rank);
  return bytes <= kTinyBytes ? call.tiny : call.payload;
}

std::vector<fl_signature> Collectives::calls() const {
  std::vector<fl_signature> calls(size_);
  for (int r = 0; r < size_; ++r) {
    if (call_of(r).number.value() == calls_) calls[r] = call_of(r).signature;
  }
  return calls;
}

// All ranks come here, or have gone. Before one announces its place again, all have called again, and
// so have read this.
Seen Collectives::compare(const fl_site& site) {
  Place& mine = segment_.block(rank_).place;
  mine.site = site;
  mine.announced.raise(calls_);
  Seen seen;
  seen.reset(size_);
  seen.calls = calls();
  for (int r = 0; r < size_; ++r) {
    Place& theirs = segment_.block(r).place;
    if (has_announced(theirs.announced, r)) seen.sites[r] = theirs.site;
  }
  return seen;
}

// A rank that has died since, or was stopped, leaves its place unknown: the mismatch is one anyway.
bool Collectives::has_announced(Counter& announced, int rank) {
  if (calls_ == 0) return false;  // the counter has wrapped: whoever never did looks as if it had
  Watch watch = watch_.at_most(kAnnouncingSeconds);
  try {
    watch.wait(announced, calls_, rank);
  } catch (const Failure&) {
    return false;
  }
  return announced.value() == calls_;
}

Seen Collectives::last_calls() const {
  Seen seen;
  seen.reset(size_);
  const int64_t now = coarse_now();
  for (int r = 0; r < size_; ++r) {
    const Call& now_or_before = call_of(r);
    const Call& other = segment_.block(r).calls[(calls_ + 1) % 2];
    const Call& last = now_or_before.number.reached(calls_) ? now_or_before : other;
    if (last.number.value() == 0) continue;  // not called yet
    seen.calls[r] = last.signature;
    seen.ages[r] = (now - last.called_at) * 1e-9;
  }
  return seen;
}

bool Collectives::is_ahead(int rank, fl_signature& call) const {
  const Call& next = segment_.block(rank).calls[(calls_ + 1) % 2];
  if (rank == rank_ || next.number.value() != calls_ + 1) return false;
  call = next.signature;
  return true;
}

// Large arrays --------------------------------------------------------------------------------

// The way of this call's `bytes`, the same on every rank, by what all have announced. Unless `may_read` it
// goes through the slots.
Way Collectives::choose(const fl_signature& mine, size_t bytes, bool may_read) {
  Choice::Slowest slowest;
  bool all_can_read = may_read && bytes >= kReadBytes;
  for (int r = 0; r < size_; ++r) {
    const Call& call = call_of(r);
    all_can_read = all_can_read && (call.kind & kCanRead) != 0;
    if ((call.kind & kIsLarge) != 0) slowest.add(call.large.costs);
  }
  const int key = mine.verb == FL_ALL_REDUCE && all_in_one_place() ? 0 : mine.verb;
  trial_ = choice_.begin(key, bytes, all_can_read ? kWays : kDirectly, slowest);
  return trial_.way;
}

// Of what rank r gave with this call.
void Collectives::read(int r, size_t begin, void* into, size_t bytes) {
  if (bytes == 0) return;
  const size_t done = remote_.read(r, call_of(r).large.address + begin, into, bytes);
  if (done < bytes) ask_for(r, begin + done, static_cast<char*>(into) + done, bytes - done);
}

// Have rank r copy into a slot of this rank what cannot be read from its memory. It does so while it
// waits, here or in end_reading(); nothing else goes through the slots meanwhile, as all ranks have
// called.
void Collectives::ask_for(int r, size_t begin, char* into, size_t bytes) {
  Request& request = segment_.block(rank_).request;
  for (size_t done = 0; done < bytes;) {
    const size_t size = std::min(segment_.chunk_bytes(), bytes - done);
    request.owner = r;
    request.begin = begin + done;
    request.bytes = size;
    const uint32_t number = request.asked.value() + 1;
    request.asked.raise(number);
    watch_.wait_and(request.served, number, r, [this] { return serve(); });
    copy(into + done, segment_.slot(rank_, 0), size);
    done += size;
  }
}

// Do what others have asked this rank for; whether any has.
bool Collectives::serve() {
  bool served = false;
  for (int r = 0; r < size_; ++r) {
    Request& request = segment_.block(r).request;
    const uint32_t number = request.asked.value();
    if (r == rank_ || number == request.served.value() || request.owner != rank_) continue;
    const char* own = reinterpret_cast<const char*>(call_of(rank_).large.address);
    stream_copy(segment_.slot(r, 0), own + request.begin, request.bytes);
    request.served.raise(number);
    served = true;
  }
  return served;
}

// Wait until nobody reads this rank's data any more.
void Collectives::end_reading() {
  RankBlock& own = segment_.block(rank_);
  const uint32_t done = ++chunks_;
  own.filled.raise(done);
  own.reduced.raise(done);
  own.drained.raise(done);
  for (int r = 0; r < size_; ++r) {
    watch_.wait_and(segment_.block(r).drained, done, r, [this] { return serve(); });
  }
}

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
