// Chunks in slots, and the verbs that move whole arrays.

#include "collectives.h"
#include "../common/copying.h"

namespace fl {
namespace {

constexpr size_t kPipelined = 4;
constexpr size_t kLeastChunk = sized(32 << 10, 64);

uint32_t chunks_of(size_t bytes, size_t chunk) {
  return static_cast<uint32_t>((bytes + chunk - 1) / chunk);
}

}  // namespace

// Copy data to a slot, where other ranks read it.
void Collectives::show(void* slot, const void* data, size_t bytes) const {
  (trial_.path == kThroughCaches ? copy : stream_copy)(slot, data, bytes);
}

void Collectives::wait_for_free_slot(uint32_t chunk) {
  for (int r = 0; r < size_; ++r) {
    if (reads(r)) watch_.wait(segment_.block(r).drained, chunk - kSlots + 1, r);
  }
}

// Return the chunk size for `bytes`, equal on every rank. Small data is divided too, so that copies overlap.
size_t Collectives::chunk_for(size_t bytes) const {
  const size_t part = (bytes / kPipelined + kLine - 1) / kLine * kLine;
  return std::min(segment_.chunk_bytes(), std::max(kLeastChunk, part));
}

// Send chunks from producers to consumers through slots. produce(c, slot) fills this rank's slot. consume(c,
// filled) waits until a producer's counter has reached `filled`, and reads the producer's slot. A rank that
// does not produce or consume increases its counters, too, so that all counters are equal at the end.
void Collectives::stream(size_t chunks, bool produces, bool consumes, const Produce& produce,
                         const Consume& consume) {
  RankBlock& block = segment_.block(rank_);
  const uint32_t base = chunks_, number = static_cast<uint32_t>(chunks);
  if (!produces) block.filled.set(base + number);
  if (!consumes) block.drained.raise(base + number);
  for (uint32_t step = 0; step <= number; ++step) {
    if (produces && step < number) {
      wait_for_free_slot(base + step);
      produce(step, segment_.slot(rank_, base + step));
      block.filled.raise(base + step + 1);
    }
    if (consumes && step > 0) {
      consume(step - 1, base + step);
      block.drained.raise(base + step);
    }
  }
  chunks_ = base + number;
  block.reduced.set(chunks_);
}

// Like stream(), but with three stages per chunk: all ranks fill their slots; then each rank reduces a part;
// then each rank collects the results.
void Collectives::stream_parts(uint32_t number, const Produce& fill, const Stage& combine, const Stage& collect) {
  RankBlock& block = segment_.block(rank_);
  const uint32_t base = chunks_;
  for (uint32_t step = 0; step < number + kAhead; ++step) {
    if (step < number) {
      wait_for_free_slot(base + step);
      fill(step, segment_.slot(rank_, base + step));
      block.filled.raise(base + step + 1);
    }
    if (step >= 1 && step - 1 < number) {
      combine(step - 1);
      block.reduced.raise(base + step);
    }
    if (step >= kAhead) {
      collect(step - kAhead);
      block.drained.raise(base + step - kAhead + 1);
    }
  }
  chunks_ = base + number;
}

// Offsets of the ranks' rows in a gathered array.
struct Collectives::Rows {
  std::vector<size_t> begin;
  size_t largest = 0;
  bool receives = false;

  size_t bytes(int r) const { return begin[r + 1] - begin[r]; }
  size_t total() const { return begin.back(); }
};

// A large array is sent like the rows of an all_gather in which only the root has rows.
Bytes Collectives::broadcast(const fl_signature& signature, void* data) {
  const int root = signature.root;
  receive_calls(signature);
  const bool is_any = signature.ndim == FL_ANY;
  const fl_signature& root_call = is_any ? description_of(root, calls_).signature : signature;
  const size_t bytes = static_cast<size_t>(root_call.count) * root_call.itemsize;
  Bytes output_bytes;
  if (is_any) output_bytes = make_bytes(bytes);
  char* const array = is_any ? output_bytes.data.get() : static_cast<char*>(data);
  if (bytes <= kInlineBytes) {
    if (rank_ != root) copy(array, inline_data(root, bytes), bytes);
    return output_bytes;
  }
  Rows rows{{0}, bytes, rank_ != root};
  for (int r = 0; r < size_; ++r) rows.begin.push_back(r < root ? 0 : bytes);
  move_rows(signature, rows, array, array);
  return output_bytes;
}

Bytes Collectives::all_gather(const fl_signature& signature, const void* data, const fl_room* room) {
  return gather_to(signature, data, room, true);
}

Bytes Collectives::gather(const fl_signature& signature, const void* data, const fl_room* room) {
  return gather_to(signature, data, room, rank_ == signature.root);
}

Bytes Collectives::gather_to(const fl_signature& signature, const void* data, const fl_room* room, bool receives) {
  const size_t item = signature.itemsize;
  receive_calls(signature);
  if (needed_.count() == 0) return {};  // this rank need not wait: see pass_rows()
  Rows rows{{0}, 0, receives};
  for (int r = 0; r < size_; ++r) {
    rows.begin.push_back(rows.total() + static_cast<size_t>(call_of(r).count) * item);
    rows.largest = std::max(rows.largest, rows.bytes(r));
  }
  const bool fits = room != nullptr && room->bytes == rows.total();
  Bytes output = receives && !fits ? make_bytes(rows.total()) : Bytes();
  char* into = fits ? static_cast<char*>(room->data) : output.data.get();
  for (int r = 0; receives && r < size_; ++r) {
    const size_t peer_bytes = rows.bytes(r);
    const bool is_here = r == rank_ || peer_bytes <= kInlineBytes;
    if (!is_here || peer_bytes == 0) continue;
    copy(into + rows.begin[r], r == rank_ ? data : inline_data(r, peer_bytes), peer_bytes);
  }
  // In a gather, only the root reads this rank's data. Other ranks with little data may have returned.
  if (signature.verb == FL_GATHER) only_reader_ = signature.root;
  if (rows.largest > kInlineBytes) move_rows(signature, rows, data, into);
  return output;
}

// Send and receive the rows that are not in the calls.
void Collectives::move_rows(const fl_signature& signature, const Rows& rows, const void* data, char* into) {
  if (choose(signature, rows.largest) == kDirectly) {
    for (int r = 0; rows.receives && r < size_; ++r) {
      if (r != rank_) read(r, 0, into + rows.begin[r], rows.bytes(r));
    }
    end_reading(rows.bytes(rank_) > 0);
  } else {
    stream_rows(rows, static_cast<const char*>(data), into);
  }
  choice_.end(trial_);
}

// Count the chunks of gather `number`. This rank returned from it before large rows were sent.
void Collectives::pass_rows(uint32_t number) {
  const fl_signature& signature = description_of(rank_, number).signature;
  size_t largest = 0;
  for (int r = 0; r < size_; ++r) {
    largest = std::max(largest, static_cast<size_t>(call_of(r, number).count) * signature.itemsize);
  }
  const bool direct = choose_in(number, signature, largest, true) == kDirectly;
  pass_chunks(direct ? 1 : chunks_of(largest, chunk_for(largest)));
}

// Count chunks that this rank does not move, so that the counters of all ranks agree.
void Collectives::pass_chunks(uint32_t chunks) {
  RankBlock& block = segment_.block(rank_);
  chunks_ += chunks;
  block.filled.set(chunks_);
  block.reduced.set(chunks_);
  block.drained.raise(chunks_);
}

void Collectives::stream_rows(const Rows& rows, const char* data, char* into) {
  const size_t chunk = chunk_for(rows.largest), bytes = rows.bytes(rank_);
  const auto fill = [&](uint32_t c, char* slot) {
    const size_t at = std::min(c * chunk, bytes);
    show(slot, data + at, std::min(chunk, bytes - at));
  };
  const auto take = [&](uint32_t c, uint32_t filled) {
    for (int r = 0; r < size_; ++r) {
      const size_t peer_bytes = rows.bytes(r), at = c * chunk;
      if (r == rank_ || peer_bytes <= kInlineBytes || at >= peer_bytes) continue;
      watch_.wait(segment_.block(r).filled, filled, r);
      const size_t size = std::min(chunk, peer_bytes - at);
      copy(into + rows.begin[r] + at, segment_.slot(r, filled - 1), size);
    }
  };
  stream(chunks_of(rows.largest, chunk), bytes > kInlineBytes, rows.receives, fill, take);
}

}  // namespace fl
