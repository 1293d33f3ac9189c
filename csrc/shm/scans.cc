// Prefix reductions: of the arrays of ranks 0 to r, or of those before r, on rank r.

#include "collectives.h"
#include "../common/copying.h"

namespace fl {

void Collectives::scan(const fl_signature& mine, void* data) {
  char* const array = static_cast<char*>(data);
  // So many arrays are combined here, from rank 0 on; of none rank 0 keeps its own.
  const int terms = rank_ + (mine.verb == FL_SCAN ? 1 : 0);
  const size_t bytes = static_cast<size_t>(mine.count) * mine.itemsize;
  receive_calls(mine);
  if (bytes <= kInlineBytes) {
    for (int r = 0; r < terms; ++r) from_[r] = r == rank_ ? array : inline_data(r, bytes);
    return reduce_terms(mine, array, terms, mine.count);
  }
  choose(mine, bytes, false);
  if (size_ <= kFewRanks) {
    const bool sees = rank_ > 0 || (terms == 1 && mine.scale != 1.0);
    combine_seen(mine, array, chunk_for(bytes), terms, rank_ + 1 < size_, sees);
  } else {
    scan_in_parts(mine, array, terms);
  }
  choice_.end(trial_);
}

// More ranks: of each chunk every rank combines one part for all, from the last rank down, and each
// result takes the place of that rank's own part, which those further down do not need. Then rank r
// collects the result of all up to the last that it combines.
void Collectives::scan_in_parts(const fl_signature& mine, char* data, int terms) {
  const size_t chunk = segment_.chunk_bytes(), bytes = static_cast<size_t>(mine.count) * mine.itemsize;
  const uint32_t base = chunks_;
  const auto size_of = [&](uint32_t c) { return std::min(chunk, bytes - c * chunk); };
  const auto fill = [&](uint32_t c, char* slot) { show(slot, data + c * chunk, size_of(c)); };
  const auto combine = [&](uint32_t c) {
    const size_t size = size_of(c), lines = (size + kLine - 1) / kLine;
    const size_t begin = std::min(size, lines * rank_ / size_ * kLine);
    const size_t end = std::min(size, lines * (rank_ + 1) / size_ * kLine);
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) watch_.wait(segment_.block(r).filled, base + c + 1, r);
      from_[r] = segment_.slot(r, base + c) + begin;
    }
    for (int r = size_; r-- > 0;) {
      reduce_terms(mine, segment_.slot(r, base + c) + begin, r + 1, (end - begin) / mine.itemsize);
    }
  };
  const auto collect = [&](uint32_t c) {
    for (int r = 0; r < size_; ++r) watch_.wait(segment_.block(r).reduced, base + c + 1, r);
    if (terms > 0) copy(data + c * chunk, segment_.slot(terms - 1, base + c), size_of(c));
  };
  stream_parts(static_cast<uint32_t>((bytes + chunk - 1) / chunk), fill, combine, collect);
}

}  // namespace fl
