// Prefix reductions: rank r gets the reduction of the arrays of ranks 0 to r (scan) or 0 to r-1 (exscan).

#include "collectives.h"
#include "../common/copying.h"

namespace fl {

void Collectives::scan(const fl_signature& signature, void* data) {
  char* const array = static_cast<char*>(data);
  // The result is the reduction of ranks 0 to terms - 1. In FL_EXSCAN, rank 0 keeps its array.
  const int terms = rank_ + (signature.verb == FL_SCAN ? 1 : 0);
  const size_t bytes = static_cast<size_t>(signature.count) * signature.itemsize;
  receive_calls(signature);
  if (bytes <= kInlineBytes) {
    for (int r = 0; r < terms; ++r) from_[r] = r == rank_ ? array : inline_data(r, bytes);
    return reduce_terms(signature, array, terms, signature.count);
  }
  choose(signature, bytes, false);
  if (size_ <= kFewRanks) {
    const bool combines = rank_ > 0 || (terms == 1 && signature.scale != 1.0);
    combine_shown(signature, array, chunk_for(bytes), terms, rank_ + 1 < size_, combines);
  } else {
    scan_in_parts(signature, array, terms);
  }
  choice_.end(trial_);
}

// For more ranks: each rank computes one part of each chunk for all ranks. In slot r, the reduction of ranks
// 0 to r replaces the data of rank r. The last slot is reduced first, because the reductions in the other
// slots do not need its data. Then each rank copies its result.
void Collectives::scan_in_parts(const fl_signature& signature, char* data, int terms) {
  const size_t chunk = segment_.chunk_bytes(), bytes = static_cast<size_t>(signature.count) * signature.itemsize;
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
      reduce_terms(signature, segment_.slot(r, base + c) + begin, r + 1, (end - begin) / signature.itemsize);
    }
  };
  const auto collect = [&](uint32_t c) {
    for (int r = 0; r < size_; ++r) watch_.wait(segment_.block(r).reduced, base + c + 1, r);
    if (terms > 0) copy(data + c * chunk, segment_.slot(terms - 1, base + c), size_of(c));
  };
  stream_parts(static_cast<uint32_t>((bytes + chunk - 1) / chunk), fill, combine, collect);
}

}  // namespace fl
