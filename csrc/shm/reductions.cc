// The verbs that reduce arrays.

#include "../reduce/reduce.h"
#include "collectives.h"
#include "../common/copying.h"

namespace fl {
namespace {

// Parts of a chunk begin at multiples of this number of elements, so that no cache line belongs to two ranks.
constexpr size_t kPartElements = sized(64, 16);

// True for dtypes whose reduction takes longer than a copy: the ranks then divide the elements.
bool is_costly(int dtype) {
  return dtype == FL_BFLOAT16 || dtype == FL_LONGDOUBLE || dtype == FL_CLONGDOUBLE;
}

}  // namespace

// The chunks of an array: number, and element range of each chunk.
struct Collectives::Chunks {
  size_t elements, itemsize, per_chunk;

  Chunks(const fl_signature& s, size_t chunk_bytes)
      : elements(static_cast<size_t>(s.count)), itemsize(s.itemsize),
        per_chunk(chunk_bytes / s.itemsize / kPartElements * kPartElements) {}

  uint32_t number() const { return static_cast<uint32_t>((elements + per_chunk - 1) / per_chunk); }
  size_t begin(uint32_t c) const { return c * per_chunk; }
  size_t size(uint32_t c) const { return std::min(per_chunk, elements - begin(c)); }
};

void Collectives::all_reduce(const fl_signature& signature, void* data) {
  receive_calls(signature);
  const size_t bytes = static_cast<size_t>(signature.count) * signature.itemsize;
  if (bytes <= kInlineBytes) {
    reduce_inline(signature, data, 0, static_cast<size_t>(signature.count), data);
    return;
  }
  choose(signature, bytes, false);
  reduce_large(signature, data);
  choice_.end(trial_);
}

void Collectives::reduce_large(const fl_signature& signature, void* data) {
  if (all_in_one_region()) return reduce_in_place(signature, data);
  char* array = static_cast<char*>(data);
  if (size_ == 2 && !is_costly(signature.dtype)) {
    return combine_shown(signature, array, segment_.chunk_bytes(), size_, true, true);
  }
  reduce_in_parts(signature, array, -1);
}

void Collectives::reduce(const fl_signature& signature, void* data) {
  const size_t count = static_cast<size_t>(signature.count), bytes = count * signature.itemsize;
  receive_calls(signature);
  if (bytes <= kInlineBytes) {
    if (rank_ == signature.root) reduce_inline(signature, data, 0, count, data);
    return;
  }
  char* array = static_cast<char*>(data);
  if (choose(signature, bytes) == kDirectly) {
    only_reader_ = signature.root;
    if (rank_ == only_reader_) reduce_read(signature, 0, array, count, array);
    end_reading(true);
  } else if (size_ <= kFewRanks && !is_costly(signature.dtype)) {
    const bool is_root = rank_ == signature.root;
    combine_shown(signature, array, chunk_for(bytes), size_, !is_root, is_root);
  } else {
    reduce_in_parts(signature, array, signature.root);
  }
  choice_.end(trial_);
}

// Reduce the arrays that were sent with the calls.
void Collectives::reduce_inline(const fl_signature& signature, const void* data, size_t skip, size_t count,
                                void* into) {
  const size_t bytes = static_cast<size_t>(signature.count) * signature.itemsize;
  for (int r = 0; r < size_; ++r) {
    from_[r] = (r == rank_ ? static_cast<const char*>(data) : inline_data(r, bytes)) + skip;
  }
  fl::reduce(signature.dtype, signature.op, signature.scale, into, from_.data(), size_, count);
}

// Each rank reduces one part of all arrays in shared memory and writes the result to all arrays.
void Collectives::reduce_in_place(const fl_signature& signature, void*) {
  const size_t count = static_cast<size_t>(signature.count), item = signature.itemsize;
  const size_t rows = (count + kPartElements - 1) / kPartElements;
  const size_t begin = std::min(count, rows * rank_ / size_ * kPartElements);
  const size_t end = std::min(count, rows * (rank_ + 1) / size_ * kPartElements);
  const size_t share = segment_.chunk_bytes() / size_ / item;
  const size_t step = std::max(kPartElements, share / kPartElements * kPartElements);
  for (size_t at = begin; at < end; at += step) {
    const size_t n = std::min(step, end - at);
    for (int r = 0; r < size_; ++r) from_[r] = in_region(r) + at * item;
    char* result = in_region(rank_) + at * item;
    fl::reduce(signature.dtype, signature.op, signature.scale, result, from_.data(), size_, n);
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) show(in_region(r) + at * item, result, n * item);
    }
  }
  RankBlock& block = segment_.block(rank_);
  const uint32_t done = ++chunks_;
  block.filled.set(done);
  block.drained.set(done);
  block.reduced.raise(done);
  for (int r = 0; r < size_; ++r) watch_.wait(segment_.block(r).reduced, done, r);
}

// For few ranks. If `shows`, copy this rank's array to its slots. If `combines`, reduce `terms` arrays.
void Collectives::combine_shown(const fl_signature& signature, char* data, size_t chunk_bytes, int terms, bool shows,
                               bool combines) {
  const Chunks chunks(signature, chunk_bytes);
  const auto fill = [&](uint32_t c, char* slot) {
    show(slot, data + chunks.begin(c) * chunks.itemsize, chunks.size(c) * chunks.itemsize);
  };
  const auto combine = [&](uint32_t c, uint32_t filled) {
    char* result = data + chunks.begin(c) * chunks.itemsize;
    for (int r = 0; r < terms; ++r) {
      if (r != rank_) watch_.wait(segment_.block(r).filled, filled, r);
      from_[r] = r == rank_ ? result : segment_.slot(r, filled - 1);
    }
    reduce_terms(signature, result, terms, chunks.size(c));
  };
  stream(chunks.number(), shows, combines, fill, combine);
}

// Reduce `count` elements of the first `terms` arrays in from_. `into` may be one of them.
void Collectives::reduce_terms(const fl_signature& signature, void* into, int terms, size_t count) {
  if (terms == 1 && signature.scale == 1.0) {
    if (into != from_[0]) copy(into, from_[0], count * signature.itemsize);
  } else if (terms > 0) {
    fl::reduce(signature.dtype, signature.op, signature.scale, into, from_.data(), terms, count);
  }
}

// Reduce `count` elements of all ranks' arrays, from byte `begin` on. The memory of other ranks is read in
// steps that fit into a second-level cache.
void Collectives::reduce_read(const fl_signature& signature, size_t begin, const char* own_data, size_t count,
                              char* into) {
  const size_t item = signature.itemsize;
  const size_t step = std::max(kPartElements, segment_.chunk_bytes() / size_ / item);
  scratch_.resize(step * item * size_);
  for (size_t at = 0; at < count; at += step) {
    const size_t n = std::min(step, count - at);
    for (int r = 0; r < size_; ++r) {
      char* peer_data = scratch_.data() + step * item * r;
      if (r != rank_) read(r, begin + at * item, peer_data, n * item);
      from_[r] = r == rank_ ? own_data + at * item : peer_data;
    }
    fl::reduce(signature.dtype, signature.op, signature.scale, into + at * item, from_.data(), size_, n);
  }
}

// For more ranks: every rank reduces its part of each chunk and copies the result to its slot. `collector`
// (-1: every rank) copies the results to `data`. `fill` omits this rank's own part: no other rank reads it.
void Collectives::reduce_in_parts(const fl_signature& signature, char* data, int collector) {
  const Chunks chunks(signature, segment_.chunk_bytes());
  const size_t item = chunks.itemsize;
  const uint32_t base = chunks_;
  const bool collects = collector < 0 || collector == rank_;
  if (collector >= 0) scratch_.resize(segment_.chunk_bytes());  // stores this rank's results for show()

  const auto part_begin = [&](uint32_t c, int r) {
    const size_t rows = (chunks.size(c) + kPartElements - 1) / kPartElements;
    return std::min(chunks.size(c), rows * r / size_ * kPartElements);
  };
  const auto fill = [&](uint32_t c, char* slot) {
    const char* source = data + chunks.begin(c) * item;
    const size_t mine_begin = part_begin(c, rank_) * item;
    const size_t mine_end = part_begin(c, rank_ + 1) * item;
    show(slot, source, mine_begin);
    show(slot + mine_end, source + mine_end, chunks.size(c) * item - mine_end);
  };
  const auto combine = [&](uint32_t c) {
    const size_t begin = part_begin(c, rank_), n = part_begin(c, rank_ + 1) - begin;
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) watch_.wait(segment_.block(r).filled, base + c + 1, r);
      from_[r] = segment_.slot(r, base + c) + begin * item;
    }
    char* result = collector < 0 ? data + (chunks.begin(c) + begin) * item : scratch_.data();
    from_[rank_] = data + (chunks.begin(c) + begin) * item;
    fl::reduce(signature.dtype, signature.op, signature.scale, result, from_.data(), size_, n);
    show(segment_.slot(rank_, base + c) + begin * item, result, n * item);
  };
  const auto collect = [&](uint32_t c) {
    for (int r = 0; r < size_; ++r) {
      watch_.wait(segment_.block(r).reduced, base + c + 1, r);
      if (!collects || (r == rank_ && collector < 0)) continue;
      const size_t begin = part_begin(c, r) * item, end = part_begin(c, r + 1) * item;
      copy(data + chunks.begin(c) * item + begin, segment_.slot(r, base + c) + begin, end - begin);
    }
  };
  stream_parts(chunks.number(), fill, combine, collect);
}

}  // namespace fl
