// The verbs that reduce arrays.

#include "../reduce/reduce.h"
#include "collectives.h"
#include "../common/copying.h"

namespace fl {
namespace {

// Parts of a chunk begin on separate lines, so that ranks do not write to the same line.
constexpr size_t kPartElements = sized(64, 16);

// Reducing these dtypes takes longer than moving them, so it should not be done twice.
bool is_costly(int dtype) {
  return dtype == FL_BFLOAT16 || dtype == FL_LONGDOUBLE || dtype == FL_CLONGDOUBLE;
}

}  // namespace

// Division of an array into chunks: the element range of each.
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

void Collectives::all_reduce(const fl_signature& mine, void* data) {
  receive_calls(mine);
  const size_t bytes = static_cast<size_t>(mine.count) * mine.itemsize;
  if (bytes <= kInlineBytes) {
    reduce_inline(mine, data, 0, static_cast<size_t>(mine.count), data);
    return;
  }
  choose(mine, bytes, false);
  reduce_large(mine, data);
  choice_.end(trial_);
}

void Collectives::reduce_large(const fl_signature& mine, void* data) {
  if (all_in_one_place()) return reduce_in_place(mine, data);
  char* array = static_cast<char*>(data);
  if (size_ == 2 && !is_costly(mine.dtype)) {
    return combine_seen(mine, array, segment_.chunk_bytes(), size_, true, true);
  }
  reduce_in_parts(mine, array, -1);
}

void Collectives::reduce(const fl_signature& mine, void* data) {
  const size_t count = static_cast<size_t>(mine.count), bytes = count * mine.itemsize;
  receive_calls(mine);
  if (bytes <= kInlineBytes) {
    if (rank_ == mine.root) reduce_inline(mine, data, 0, count, data);
    return;
  }
  char* array = static_cast<char*>(data);
  if (choose(mine, bytes) == kDirectly) {
    if (rank_ == mine.root) reduce_read(mine, 0, array, count, array);
    end_reading();
  } else if (size_ <= kFewRanks && !is_costly(mine.dtype)) {
    const bool is_root = rank_ == mine.root;
    combine_seen(mine, array, chunk_for(bytes), size_, !is_root, is_root);
  } else {
    reduce_in_parts(mine, array, mine.root);
  }
  choice_.end(trial_);
}

// All data came with the calls, and every rank reduces it.
void Collectives::reduce_inline(const fl_signature& mine, const void* data, size_t skip, size_t count, void* into) {
  const size_t bytes = static_cast<size_t>(mine.count) * mine.itemsize;
  for (int r = 0; r < size_; ++r) {
    from_[r] = (r == rank_ ? static_cast<const char*>(data) : inline_data(r, bytes)) + skip;
  }
  fl::reduce(mine.dtype, mine.op, mine.scale, into, from_.data(), size_, count);
}

// Every rank maps all arrays, reduces its part of them in place, and writes the result into all of them.
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
  block.filled.set(done);
  block.drained.set(done);
  block.reduced.raise(done);
  for (int r = 0; r < size_; ++r) watch_.wait(segment_.block(r).reduced, done, r);
}

// Few ranks: ranks that are `seen` show their arrays. Ranks that `see` combine the arrays of ranks 0 to
// `terms` - 1 with their own.
void Collectives::combine_seen(const fl_signature& mine, char* data, size_t chunk_bytes, int terms, bool seen,
                               bool sees) {
  const Chunks chunks(mine, chunk_bytes);
  const auto fill = [&](uint32_t c, char* slot) {
    show(slot, data + chunks.begin(c) * chunks.itemsize, chunks.size(c) * chunks.itemsize);
  };
  const auto combine = [&](uint32_t c, uint32_t filled) {
    char* result = data + chunks.begin(c) * chunks.itemsize;
    for (int r = 0; r < terms; ++r) {
      if (r != rank_) watch_.wait(segment_.block(r).filled, filled, r);
      from_[r] = r == rank_ ? result : segment_.slot(r, filled - 1);
    }
    reduce_terms(mine, result, terms, chunks.size(c));
  };
  stream(chunks.number(), seen, sees, fill, combine);
}

// Reduce `count` elements of the first `terms` arrays; `into` may be one of them.
void Collectives::reduce_terms(const fl_signature& mine, void* into, int terms, size_t count) {
  if (terms == 1 && mine.scale == 1.0) {
    if (into != from_[0]) copy(into, from_[0], count * mine.itemsize);
  } else if (terms > 0) {
    fl::reduce(mine.dtype, mine.op, mine.scale, into, from_.data(), terms, count);
  }
}

// Reduce `count` elements of all ranks, starting at byte `begin` of their arrays. The data of other ranks is
// read in steps that fit into a second-level cache.
void Collectives::reduce_read(const fl_signature& mine, size_t begin, const char* own, size_t count, char* into) {
  const size_t item = mine.itemsize;
  const size_t step = std::max(kPartElements, segment_.chunk_bytes() / size_ / item);
  scratch_.resize(step * item * size_);
  for (size_t at = 0; at < count; at += step) {
    const size_t n = std::min(step, count - at);
    for (int r = 0; r < size_; ++r) {
      char* theirs = scratch_.data() + step * item * r;
      if (r != rank_) read(r, begin + at * item, theirs, n * item);
      from_[r] = r == rank_ ? own + at * item : theirs;
    }
    fl::reduce(mine.dtype, mine.op, mine.scale, into + at * item, from_.data(), size_, n);
  }
}

// More ranks: every rank reduces one part of each chunk and shows the result. `collector`: rank that collects
// the results, or -1 for all ranks. Only one rank accesses a part, so the result can replace the input.
void Collectives::reduce_in_parts(const fl_signature& mine, char* data, int collector) {
  const Chunks chunks(mine, segment_.chunk_bytes());
  const size_t item = chunks.itemsize;
  const uint32_t base = chunks_;
  const bool collects = collector < 0 || collector == rank_;
  if (collector >= 0) scratch_.resize(segment_.chunk_bytes());  // for results that this rank does not keep

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
    fl::reduce(mine.dtype, mine.op, mine.scale, result, from_.data(), size_, n);
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
