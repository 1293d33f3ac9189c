// How chunks flow through the slots, and the verbs that move whole arrays.
#include <algorithm>
#include <cstring>

#include "collectives.h"
#include "streaming.h"

namespace fl {
namespace {

uint32_t chunks_of(size_t bytes, size_t chunk) {
  return static_cast<uint32_t>((bytes + chunk - 1) / chunk);
}

}  // namespace

// Write what the others will read.
void Collectives::show(void* slot, const void* data, size_t bytes) const {
  if (choice_.streams()) {
    stream_copy(slot, data, bytes);
  } else {
    std::memcpy(slot, data, bytes);
  }
}

void Collectives::wait_for_free_slot(uint32_t chunk) {
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) watch_.wait(segment_.block(r).drained, chunk - kSlots + 1, r);
  }
}

// Chunks flow from every producer's slots to every consumer. `produce(c, slot)` fills this rank's
// slot, `consume(c)` reads the others'. Every rank counts every chunk, so that counters agree.
void Collectives::stream(size_t chunks, bool produces, bool consumes, const Produce& produce,
                         const Consume& consume) {
  RankBlock& own = segment_.block(rank_);
  const uint32_t base = chunks_, number = static_cast<uint32_t>(chunks);
  for (uint32_t step = 0; step <= number; ++step) {
    if (step < number) {
      if (produces) {
        wait_for_free_slot(base + step);
        produce(step, segment_.slot(rank_, base + step));
      }
      own.filled.raise(base + step + 1);
    }
    if (step == 0) continue;
    if (consumes) consume(step - 1, base + step);
    own.drained.raise(base + step);
  }
  chunks_ = base + number;
  own.reduced.raise(chunks_);
}

void Collectives::broadcast(const fl_signature& mine, void* data) {
  const size_t bytes = static_cast<size_t>(mine.count) * mine.itemsize;
  const int root = mine.root;
  char* array = static_cast<char*>(data);
  if (bytes <= kInlineBytes) {
    // The others' data must not travel, but their calls must look the same.
    enter(mine, data, rank_ == root ? bytes : 0);
    if (rank_ != root) std::memcpy(data, inline_data(root, bytes), bytes);
    return;
  }
  enter(mine, data, 0);
  const size_t chunk = segment_.chunk_bytes();
  const auto size = [&](uint32_t c) { return std::min(chunk, bytes - c * chunk); };
  stream(
      chunks_of(bytes, chunk), rank_ == root, rank_ != root,
      [&](uint32_t c, char* slot) { stream_copy(slot, array + c * chunk, size(c)); },
      [&](uint32_t c, uint32_t filled) {
        watch_.wait(segment_.block(root).filled, filled, root);
        std::memcpy(array + c * chunk, segment_.slot(root, filled - 1), size(c));
      });
}

Bytes Collectives::all_gather(const fl_signature& mine, const void* data, const fl_room* room) {
  return gather_to(mine, data, room, true);
}

Bytes Collectives::gather(const fl_signature& mine, const void* data, const fl_room* room) {
  return gather_to(mine, data, room, rank_ == mine.root);
}

Bytes Collectives::gather_to(const fl_signature& mine, const void* data, const fl_room* room,
                             bool wanted) {
  const size_t item = mine.itemsize, bytes = static_cast<size_t>(mine.count) * item;
  enter(mine, data, bytes <= kInlineBytes ? bytes : 0);
  std::vector<size_t> begin(size_ + 1, 0);
  size_t largest = 0;
  for (int r = 0; r < size_; ++r) {
    const size_t theirs = static_cast<size_t>(call_of(r).count) * item;
    begin[r + 1] = begin[r] + theirs;
    largest = std::max(largest, theirs);
  }
  const bool fits = room != nullptr && room->bytes == begin[size_];
  Bytes output = wanted && !fits ? make_bytes(begin[size_]) : Bytes();
  char* into = fits ? static_cast<char*>(room->data) : output.data.get();
  const size_t chunk = segment_.chunk_bytes();
  if (wanted && bytes > 0) std::memcpy(into + begin[rank_], data, bytes);
  const auto take_inline = [&](int r) {
    const size_t theirs = begin[r + 1] - begin[r];
    if (wanted && r != rank_ && theirs > 0 && theirs <= kInlineBytes) {
      std::memcpy(into + begin[r], inline_data(r, theirs), theirs);
    }
  };
  for (int r = 0; r < size_; ++r) take_inline(r);
  if (largest <= kInlineBytes) return output;
  const char* source = static_cast<const char*>(data);
  stream(
      chunks_of(largest, chunk), bytes > kInlineBytes, wanted,
      [&](uint32_t c, char* slot) {
        const size_t at = std::min(c * chunk, bytes);
        stream_copy(slot, source + at, std::min(chunk, bytes - at));
      },
      [&](uint32_t c, uint32_t filled) {
        for (int r = 0; r < size_; ++r) {
          const size_t theirs = begin[r + 1] - begin[r], at = c * chunk;
          if (r == rank_ || theirs <= kInlineBytes || at >= theirs) continue;
          watch_.wait(segment_.block(r).filled, filled, r);
          std::memcpy(into + begin[r] + at, segment_.slot(r, filled - 1),
                      std::min(chunk, theirs - at));
        }
      });
  return output;
}

}  // namespace fl
