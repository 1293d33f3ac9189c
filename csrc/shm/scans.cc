// Prefix reductions: of the arrays of ranks 0 to r, or of those before r, on rank r.

#include "../reduce/reduce.h"
#include "collectives.h"
#include "../common/copying.h"

namespace fl {

struct Collectives::Scan {
  Collectives& group;
  const fl_signature& mine;
  char* const data;
  const int terms;  // so many arrays are combined here, from rank 0 on; of none rank 0 keeps its own
  const size_t item = mine.itemsize, bytes = static_cast<size_t>(mine.count) * item;

  void combine() {
    if (bytes <= kInlineBytes) return combine_inline();
    group.choose(mine, bytes, false);
    group.size_ <= kFewRanks ? combine_seen() : combine_in_parts();
    group.choice_.end(group.trial_);
  }

  // Of `size` bytes of each; `into` may be one of them.
  void reduce(char* into, int number, size_t size) {
    if (number == 1 && mine.scale == 1.0) {
      if (into != group.from_[0]) copy(into, group.from_[0], size);
    } else if (number > 0) {
      fl::reduce(mine.dtype, mine.op, mine.scale, into, group.from_.data(), number, size / item);
    }
  }

  void combine_inline() {
    for (int r = 0; r < terms; ++r) {
      group.from_[r] = r == group.rank_ ? data : group.inline_data(r, bytes);
    }
    reduce(data, terms, bytes);
  }

  // Few ranks: each shows its array, and combines with its own what it sees of those before it.
  void combine_seen() {
    const size_t chunk = group.chunk_for(bytes);
    const auto size = [&](uint32_t c) { return std::min(chunk, bytes - c * chunk); };
    const auto fill = [&](uint32_t c, char* slot) { group.show(slot, data + c * chunk, size(c)); };
    const auto take = [&](uint32_t c, uint32_t filled) {
      for (int r = 0; r < terms; ++r) {
        if (r != group.rank_) group.watch_.wait(group.segment_.block(r).filled, filled, r);
        group.from_[r] = r == group.rank_ ? data + c * chunk : group.segment_.slot(r, filled - 1);
      }
      reduce(data + c * chunk, terms, size(c));
    };
    const bool is_seen = group.rank_ + 1 < group.size_;
    const bool sees = group.rank_ > 0 || (terms == 1 && mine.scale != 1.0);
    group.stream((bytes + chunk - 1) / chunk, is_seen, sees, fill, take);
  }

  // More ranks: of each chunk every rank combines one part for all, from the last rank down, and each
  // result takes the place of that rank's own part, which those further down do not need. Then rank r
  // collects the result of all up to the last that it combines.
  void combine_in_parts() {
    const size_t chunk = group.segment_.chunk_bytes();
    const uint32_t base = group.chunks_;
    const uint32_t number = static_cast<uint32_t>((bytes + chunk - 1) / chunk);
    for (uint32_t step = 0; step < number + kAhead; ++step) {
      if (step < number) fill_slot(base, step);
      if (step >= 1 && step - 1 < number) combine_part(base, step - 1);
      if (step >= kAhead) collect(base, step - kAhead);
    }
    group.chunks_ = base + number;
  }

  size_t size_of(uint32_t c) const {
    return std::min(group.segment_.chunk_bytes(), bytes - c * group.segment_.chunk_bytes());
  }

  void fill_slot(uint32_t base, uint32_t c) {
    group.wait_for_free_slot(base + c);
    char* slot = group.segment_.slot(group.rank_, base + c);
    group.show(slot, data + c * group.segment_.chunk_bytes(), size_of(c));
    group.segment_.block(group.rank_).filled.raise(base + c + 1);
  }

  void combine_part(uint32_t base, uint32_t c) {
    const size_t size = size_of(c), lines = (size + kLine - 1) / kLine;
    const size_t begin = std::min(size, lines * group.rank_ / group.size_ * kLine);
    const size_t end = std::min(size, lines * (group.rank_ + 1) / group.size_ * kLine);
    for (int r = 0; r < group.size_; ++r) {
      if (r != group.rank_) group.watch_.wait(group.segment_.block(r).filled, base + c + 1, r);
      group.from_[r] = group.segment_.slot(r, base + c) + begin;
    }
    for (int r = group.size_; r-- > 0;) {
      reduce(group.segment_.slot(r, base + c) + begin, r + 1, end - begin);
    }
    group.segment_.block(group.rank_).reduced.raise(base + c + 1);
  }

  void collect(uint32_t base, uint32_t c) {
    for (int r = 0; r < group.size_; ++r) {
      group.watch_.wait(group.segment_.block(r).reduced, base + c + 1, r);
    }
    if (terms > 0) {
      char* into = data + c * group.segment_.chunk_bytes();
      copy(into, group.segment_.slot(terms - 1, base + c), size_of(c));
    }
    group.segment_.block(group.rank_).drained.raise(base + c + 1);
  }
};

void Collectives::scan(const fl_signature& mine, void* data) {
  receive_calls(mine);
  Scan{*this, mine, static_cast<char*>(data), rank_ + (mine.verb == FL_SCAN ? 1 : 0)}.combine();
}

}  // namespace fl
