// The collectives that move data without combining whole arrays, and send and recv.
#include <algorithm>
#include <cstring>

#include "../common/signature.h"
#include "../reduce/reduce.h"
#include "collectives.h"
#include "streaming.h"

namespace fl {
namespace {

uint32_t chunks_of(size_t bytes, size_t chunk) {
  return static_cast<uint32_t>((bytes + chunk - 1) / chunk);
}

}  // namespace

// Chunks flow from every producer's slots to every consumer. `produce(c, slot)` fills this rank's
// slot, `consume(c)` reads the others'. Every rank counts every chunk, so that counters agree.
template <typename Produce, typename Consume>
void Collectives::stream(size_t chunks, bool produces, bool consumes, Produce produce,
                         Consume consume) {
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
        peers_.wait(segment_.block(root).filled, filled, root);
        std::memcpy(array + c * chunk, segment_.slot(root, filled - 1), size(c));
      });
}

Bytes Collectives::all_gather(const fl_signature& mine, const void* data) {
  return gather_to(mine, data, true);
}

Bytes Collectives::gather(const fl_signature& mine, const void* data) {
  return gather_to(mine, data, rank_ == mine.root);
}

Bytes Collectives::gather_to(const fl_signature& mine, const void* data, bool wanted) {
  const size_t item = mine.itemsize, bytes = static_cast<size_t>(mine.count) * item;
  enter(mine, data, bytes <= kInlineBytes ? bytes : 0);
  std::vector<size_t> begin(size_ + 1, 0);
  size_t largest = 0;
  for (int r = 0; r < size_; ++r) {
    const size_t theirs = static_cast<size_t>(call_of(r).count) * item;
    begin[r + 1] = begin[r] + theirs;
    largest = std::max(largest, theirs);
  }
  const size_t total = wanted ? begin[size_] : 0;
  Bytes output{std::unique_ptr<char[]>(new char[total + 1]), total};  // never a null pointer
  char* into = output.data.get();
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
          peers_.wait(segment_.block(r).filled, filled, r);
          std::memcpy(into + begin[r] + at, segment_.slot(r, filled - 1),
                      std::min(chunk, theirs - at));
        }
      });
  return output;
}

// Every producer's data has a section of `section` bytes for each rank; a chunk holds the same
// piece of all sections. `take(at, bytes, filled)` uses what has come for this rank.
template <typename Take>
void Collectives::stream_sections(const void* data, size_t section, int only_source, Take take) {
  const char* source = static_cast<const char*>(data);
  const size_t lane = segment_.chunk_bytes() / size_ / kLine * kLine;
  const bool produces = only_source < 0 || only_source == rank_;
  stream(
      chunks_of(section, lane), produces, true,
      [&](uint32_t c, char* slot) {
        const size_t at = c * lane, bytes = std::min(lane, section - at);
        for (int r = 0; r < size_; ++r) {
          if (r != rank_) stream_copy(slot + r * lane, source + r * section + at, bytes);
        }
      },
      [&](uint32_t c, uint32_t filled) {
        const size_t at = c * lane;
        for (int r = 0; r < size_; ++r) {
          const bool awaited = r != rank_ && (only_source < 0 || only_source == r);
          if (awaited) peers_.wait(segment_.block(r).filled, filled, r);
          from_[r] = r == rank_ ? source + rank_ * section + at
                                : segment_.slot(r, filled - 1) + rank_ * lane;
        }
        take(at, std::min(lane, section - at));
      });
}

void Collectives::reduce_scatter(const fl_signature& mine, const void* data, void* output) {
  const size_t item = mine.itemsize, part = static_cast<size_t>(mine.count) / size_;
  const size_t bytes = part * item * size_;
  if (bytes <= kInlineBytes) {
    enter(mine, data, bytes);
    reduce_inline(mine, data, part * item * rank_, part, output);
    return;
  }
  enter(mine, data, 0);
  stream_sections(data, part * item, -1, [&](size_t at, size_t size) {
    fl::reduce(mine.dtype, mine.op, mine.scale, static_cast<char*>(output) + at, from_.data(),
               size_, size / item);
  });
}

void Collectives::all_to_all(const fl_signature& mine, const void* data, void* output) {
  const size_t item = mine.itemsize;
  const size_t section = static_cast<size_t>(mine.count) / size_ * item;
  char* into = static_cast<char*>(output);
  if (section * size_ <= kInlineBytes) {
    enter(mine, data, section * size_);
    for (int r = 0; r < size_; ++r) {
      const char* theirs =
          r == rank_ ? static_cast<const char*>(data) : inline_data(r, section * size_);
      std::memcpy(into + r * section, theirs + rank_ * section, section);
    }
    return;
  }
  enter(mine, data, 0);
  stream_sections(data, section, -1, [&](size_t at, size_t size) {
    for (int r = 0; r < size_; ++r) std::memcpy(into + r * section + at, from_[r], size);
  });
}

// The signature's count is that of one part; only the root's data is read.
void Collectives::scatter(const fl_signature& mine, const void* data, void* output) {
  const size_t item = mine.itemsize, section = static_cast<size_t>(mine.count) * item;
  char* into = static_cast<char*>(output);
  const int root = mine.root;
  if (section * size_ <= kInlineBytes) {
    enter(mine, data, rank_ == root ? section * size_ : 0);
    const char* whole =
        rank_ == root ? static_cast<const char*>(data) : inline_data(root, section * size_);
    std::memcpy(into, whole + rank_ * section, section);
    return;
  }
  enter(mine, data, 0);
  stream_sections(data, section, root,
                  [&](size_t at, size_t size) { std::memcpy(into + at, from_[root], size); });
}

// Send and recv -------------------------------------------------------------------------------

// Both ends show each other what they call before the data moves, so that both see a mismatch.
void Collectives::handshake(const fl_signature& mine, int peer, bool sender, Seen& seen) {
  Channel& channel = sender ? segment_.channel(rank_, peer) : segment_.channel(peer, rank_);
  Counter& own = sender ? channel.sent : channel.received;
  Counter& other = sender ? channel.received : channel.sent;
  const uint32_t number = own.value() + 1;
  (sender ? channel.offer : channel.demand)[number % 2] = mine;
  own.raise(number);
  peers_.wait(other, number, peer);
  fl_signature theirs = (sender ? channel.demand : channel.offer)[number % 2];
  seen[rank_] = mine;
  seen[peer] = theirs;
  seen[rank_].sequence = seen[peer].sequence = sequence_of(number);
  theirs.verb = mine.verb;
  if (!same_call(mine, theirs)) throw Mismatch();
}

void Collectives::send(const fl_signature& mine, const void* data, int peer, Seen& seen) {
  handshake(mine, peer, true, seen);
  Channel& channel = segment_.channel(rank_, peer);
  const size_t bytes = static_cast<size_t>(mine.count) * mine.itemsize;
  const size_t piece = segment_.piece_bytes();
  const uint32_t base = channel.sent.value(), number = chunks_of(bytes, piece);
  const char* source = static_cast<const char*>(data);
  for (uint32_t i = 0; i < number; ++i) {
    if (i >= 2) peers_.wait(channel.received, base + i - 1, peer);
    stream_copy(segment_.piece(rank_, peer, i), source + i * piece,
                std::min(piece, bytes - i * piece));
    channel.sent.raise(base + i + 1);
  }
  peers_.wait(channel.received, base + number, peer);
}

void Collectives::recv(const fl_signature& mine, void* data, int peer, Seen& seen) {
  handshake(mine, peer, false, seen);
  Channel& channel = segment_.channel(peer, rank_);
  const size_t bytes = static_cast<size_t>(mine.count) * mine.itemsize;
  const size_t piece = segment_.piece_bytes();
  const uint32_t base = channel.received.value(), number = chunks_of(bytes, piece);
  char* into = static_cast<char*>(data);
  for (uint32_t i = 0; i < number; ++i) {
    peers_.wait(channel.sent, base + i + 1, peer);
    std::memcpy(into + i * piece, segment_.piece(peer, rank_, i),
                std::min(piece, bytes - i * piece));
    channel.received.raise(base + i + 1);
  }
}

}  // namespace fl
