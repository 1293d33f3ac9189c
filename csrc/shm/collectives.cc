#include "collectives.h"

#include <algorithm>
#include <cstring>

#include "../common/signature.h"
#include "../reduce/reduce.h"
#include "streaming.h"

namespace fl {
namespace {

// A pipeline stage runs this many chunks ahead of the next, to have work while peers catch up.
constexpr uint32_t kAhead = 2;
static_assert(kAhead < kSlots, "a slot is filled again only when its chunk was drained");

// Parts of a chunk begin on lines of their own, so that ranks do not write to one line.
constexpr size_t kPartElements = 64;

// Combining these takes longer than moving them, and should be done once, not by each of two.
bool is_costly(int dtype) {
  return dtype == kBfloat16 || dtype == kLongDouble || dtype == kComplexLongDouble;
}

constexpr uint32_t kVote = 1u << 31;

uint32_t kind_of(const fl_signature& s) {
  return static_cast<uint32_t>(s.verb) << 16 | static_cast<uint32_t>(s.dtype) << 8 |
         static_cast<uint32_t>(s.op);
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

}  // namespace

// How an array goes through the slots: the element ranges of its chunks.
struct Collectives::Chunks {
  size_t elements, itemsize, per_chunk;

  Chunks(const fl_signature& s, size_t chunk_bytes)
      : elements(static_cast<size_t>(s.count)),
        itemsize(s.itemsize),
        per_chunk(chunk_bytes / s.itemsize / kPartElements * kPartElements) {}

  uint32_t number() const { return static_cast<uint32_t>((elements + per_chunk - 1) / per_chunk); }
  size_t begin(uint32_t c) const { return c * per_chunk; }
  size_t size(uint32_t c) const { return std::min(per_chunk, elements - begin(c)); }
};

Collectives::Collectives(Segment& segment, Peers& peers, int rank, int size)
    : segment_(segment), peers_(peers), rank_(rank), size_(size), from_(size) {}

// Entering a call -----------------------------------------------------------------------------

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
  bool same = true;
  const bool free = first_dimension_is_free(mine.verb);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    Call& theirs = segment_.block(r).calls[calls_ % 2];
    peers_.wait(theirs.number, calls_, r);
    same = same && (theirs.kind | kVote) == (call.kind | kVote) && theirs.root == call.root &&
           theirs.scale == call.scale && theirs.shape == call.shape &&
           (free || theirs.count == call.count);
  }
  if (!same) throw Mismatch();
}

const char* Collectives::inline_data(int rank, size_t bytes) const {
  const Call& call = call_of(rank);
  return bytes <= kTinyBytes ? call.tiny : call.payload;
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

// Reductions ----------------------------------------------------------------------------------

void Collectives::all_reduce(const fl_signature& mine, void* data) {
  call_all_reduce(mine, data);
  complete_all_reduce(mine, data);
}

void Collectives::call_all_reduce(const fl_signature& mine, const void* data) {
  const size_t bytes = static_cast<size_t>(mine.count) * mine.itemsize;
  tell(mine, data, bytes <= kInlineBytes ? bytes : 0);
}

bool Collectives::called() const {
  for (int r = 0; r < size_; ++r) {
    if (!call_of(r).number.reached(calls_)) return false;
  }
  return true;
}

void Collectives::complete_all_reduce(const fl_signature& mine, void* data) {
  hear(mine);
  if (static_cast<size_t>(mine.count) * mine.itemsize <= kInlineBytes) {
    reduce_inline(mine, data, 0, static_cast<size_t>(mine.count), data);
    return;
  }
  choice_.begin(static_cast<size_t>(mine.count) * mine.itemsize, all_in_one_place(), calls_);
  reduce_large(mine, data);
  choice_.end();
  choice_.count(votes(), size_);
}

void Collectives::reduce_large(const fl_signature& mine, void* data) {
  if (all_in_one_place()) return reduce_in_place(mine, data);
  if (size_ == 2 && !is_costly(mine.dtype)) return exchange_two(mine, static_cast<char*>(data));
  reduce_in_parts(mine, static_cast<char*>(data), -1);
}

int Collectives::votes() const {
  int votes = 0;
  for (int r = 0; r < size_; ++r) votes += (call_of(r).kind & kVote) != 0 ? 1 : 0;
  return votes;
}

// Write what the others will read.
void Collectives::show(void* slot, const void* data, size_t bytes) const {
  if (choice_.streams()) {
    stream_copy(slot, data, bytes);
  } else {
    std::memcpy(slot, data, bytes);
  }
}

void Collectives::reduce(const fl_signature& mine, void* data) {
  const size_t bytes = static_cast<size_t>(mine.count) * mine.itemsize;
  if (bytes <= kInlineBytes) {
    enter(mine, data, bytes);
    if (rank_ == mine.root) reduce_inline(mine, data, 0, static_cast<size_t>(mine.count), data);
    return;
  }
  enter(mine, data, 0);
  reduce_in_parts(mine, static_cast<char*>(data), mine.root);
}

// One shot: everybody's data came with the call, and everybody reduces it.
void Collectives::reduce_inline(const fl_signature& mine, const void* data, size_t skip,
                                size_t count, void* into) {
  const size_t bytes = static_cast<size_t>(mine.count) * mine.itemsize;
  for (int r = 0; r < size_; ++r) {
    from_[r] = (r == rank_ ? static_cast<const char*>(data) : inline_data(r, bytes)) + skip;
  }
  fl::reduce(mine.dtype, mine.op, mine.scale, into, from_.data(), size_, count);
}

// Every array is mapped by everyone: each rank reduces its part of all of them where it lies, and
// writes the result into all of them. Nobody else touches that part.
void Collectives::reduce_in_place(const fl_signature& mine, void*) {
  const size_t count = static_cast<size_t>(mine.count), item = mine.itemsize;
  const size_t rows = (count + kPartElements - 1) / kPartElements;
  const size_t begin = std::min(count, rows * rank_ / size_ * kPartElements);
  const size_t end = std::min(count, rows * (rank_ + 1) / size_ * kPartElements);
  const size_t share = segment_.chunk_bytes() / size_ / item;
  const size_t step = std::max(kPartElements, share / kPartElements * kPartElements);
  for (size_t at = begin; at < end; at += step) {
    const size_t n = std::min(step, end - at);
    for (int r = 0; r < size_; ++r) from_[r] = in_region(r) + at * item;
    char* result = in_region(rank_) + at * item;
    fl::reduce(mine.dtype, mine.op, mine.scale, result, from_.data(), size_, n);
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) show(in_region(r) + at * item, result, n * item);
    }
  }
  RankBlock& block = segment_.block(rank_);
  const uint32_t done = ++chunks_;
  block.filled.raise(done);
  block.drained.raise(done);
  block.reduced.raise(done);
  for (int r = 0; r < size_; ++r) peers_.wait(segment_.block(r).reduced, done, r);
}

void Collectives::wait_for_free_slot(uint32_t chunk) {
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) peers_.wait(segment_.block(r).drained, chunk - kSlots + 1, r);
  }
}

// Two ranks: each shows the other its array, chunk by chunk, and adds what it sees to its own.
void Collectives::exchange_two(const fl_signature& mine, char* data) {
  const Chunks chunks(mine, segment_.chunk_bytes());
  const int peer = 1 - rank_;
  RankBlock &own = segment_.block(rank_), &theirs = segment_.block(peer);
  const uint32_t base = chunks_, number = chunks.number();
  uint32_t filled = 0;
  for (uint32_t c = 0; c < number; ++c) {
    for (; filled < std::min(number, c + kAhead); ++filled) {
      wait_for_free_slot(base + filled);
      show(segment_.slot(rank_, base + filled), data + chunks.begin(filled) * chunks.itemsize,
                  chunks.size(filled) * chunks.itemsize);
      own.filled.raise(base + filled + 1);
    }
    peers_.wait(theirs.filled, base + c + 1, peer);
    char* result = data + chunks.begin(c) * chunks.itemsize;
    from_[rank_] = result;
    from_[peer] = segment_.slot(peer, base + c);
    fl::reduce(mine.dtype, mine.op, mine.scale, result, from_.data(), 2, chunks.size(c));
    own.drained.raise(base + c + 1);
  }
  chunks_ = base + number;
  own.reduced.raise(chunks_);
}

// More ranks: of each chunk every rank reduces one part and shows the result, which the others
// collect. `collector` is the only rank that does, or -1 for all.
//
// A part is read and written by one rank alone, so its result can take the place of its input.
void Collectives::reduce_in_parts(const fl_signature& mine, char* data, int collector) {
  const Chunks chunks(mine, segment_.chunk_bytes());
  const size_t item = chunks.itemsize;
  RankBlock& own = segment_.block(rank_);
  const uint32_t base = chunks_, number = chunks.number();
  const bool collects = collector < 0 || collector == rank_;
  if (collector >= 0) scratch_.resize(segment_.chunk_bytes());  // a result that is not for this rank

  const auto part_begin = [&](uint32_t c, int r) {
    const size_t rows = (chunks.size(c) + kPartElements - 1) / kPartElements;
    return std::min(chunks.size(c), rows * r / size_ * kPartElements);
  };
  const auto fill = [&](uint32_t c) {
    wait_for_free_slot(base + c);
    char* slot = segment_.slot(rank_, base + c);
    const char* source = data + chunks.begin(c) * item;
    const size_t mine_begin = part_begin(c, rank_) * item;
    const size_t mine_end = part_begin(c, rank_ + 1) * item;
    show(slot, source, mine_begin);
    show(slot + mine_end, source + mine_end, chunks.size(c) * item - mine_end);
    own.filled.raise(base + c + 1);
  };
  const auto combine = [&](uint32_t c) {
    const size_t begin = part_begin(c, rank_), n = part_begin(c, rank_ + 1) - begin;
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) peers_.wait(segment_.block(r).filled, base + c + 1, r);
      from_[r] = segment_.slot(r, base + c) + begin * item;
    }
    char* result = collector < 0 ? data + (chunks.begin(c) + begin) * item : scratch_.data();
    from_[rank_] = data + (chunks.begin(c) + begin) * item;
    fl::reduce(mine.dtype, mine.op, mine.scale, result, from_.data(), size_, n);
    show(segment_.slot(rank_, base + c) + begin * item, result, n * item);
    own.reduced.raise(base + c + 1);
  };
  const auto collect = [&](uint32_t c) {
    for (int r = 0; r < size_; ++r) {
      peers_.wait(segment_.block(r).reduced, base + c + 1, r);
      if (!collects || (r == rank_ && collector < 0)) continue;
      const size_t begin = part_begin(c, r) * item, end = part_begin(c, r + 1) * item;
      std::memcpy(data + chunks.begin(c) * item + begin, segment_.slot(r, base + c) + begin,
                  end - begin);
    }
    own.drained.raise(base + c + 1);
  };

  for (uint32_t step = 0; step < number + kAhead; ++step) {
    if (step < number) fill(step);
    if (step >= 1 && step - 1 < number) combine(step - 1);
    if (step >= kAhead) collect(step - kAhead);
  }
  chunks_ = base + number;
}

}  // namespace fl
