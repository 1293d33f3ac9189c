// Collectives that move data without reducing it.

#include "collectives.h"

namespace fl {
namespace {

template <typename Visit>
void for_each_piece(size_t bytes, Visit visit) {
  for (size_t at = 0; at < bytes; at += kChunkBytes) visit(at, std::min(kChunkBytes, bytes - at));
}

// Return a part of the root's array for each other rank.
Parts parts_for_others(size_t bytes, int ranks, int root) {
  const size_t receivers = ranks - 1;
  const int last = root == ranks - 1 ? ranks - 2 : ranks - 1;
  return adjacent_parts(ranks, [&](int r) {
    return r == root ? 0 : bytes / receivers + (r == last ? bytes % receivers : 0);
  });
}

}  // namespace

// Copy small received parts into `into`, then send and receive the large parts.
void Collectives::deliver(Call& call, const void* from, const Parts& give, void* into, const Parts& take) {
  char* const target = static_cast<char*>(into);
  fetch(take);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || take[r].bytes == 0 || take[r].bytes > kInlineBytes) continue;
    std::memcpy(target + take[r].begin, payload(r), take[r].bytes);
  }
  move_large(call, from, give, target, take);
}

// Send range give[r] of `from` to each rank r, and receive range take[r] of `into` from each rank r. All
// transfers run at the same time. Ranges of at most kInlineBytes are skipped.
void Collectives::move_large(Call& call, const void* from, const Parts& give, char* into, const Parts& take) {
  const char* const source = static_cast<const char*>(from);
  std::vector<Buffer> sends(size_), receives(size_);
  for (int step = 1; step < size_; ++step) {
    const int r = (rank_ + step) % size_;
    if (take[r].bytes > kInlineBytes) {
      receives[r] = mesh_.buffer(into + take[r].begin, take[r].bytes);
      for_each_piece(take[r].bytes,
                     [&](size_t at, size_t n) { receives[r]->recv(r, kPartSlot, at, n); });
    }
    if (give[r].bytes > kInlineBytes) {
      sends[r] = mesh_.buffer(source + give[r].begin, give[r].bytes);
      for_each_piece(give[r].bytes,
                     [&](size_t at, size_t n) { sends[r]->send(r, kPartSlot, at, n); });
    }
  }
  const Part& own_part = give[rank_];
  if (take[rank_].bytes > 0) std::memcpy(into + take[rank_].begin, source + own_part.begin, own_part.bytes);
  for (int r = 0; r < size_; ++r) {
    if (!receives[r]) continue;
    for_each_piece(take[r].bytes, [&](size_t, size_t) { call.waiter.received(*receives[r], r); });
  }
  for (int r = 0; r < size_; ++r) {
    if (!sends[r]) continue;
    for_each_piece(give[r].bytes, [&](size_t, size_t) { call.waiter.sent(*sends[r], r); });
  }
}

// If the array is large, the root sends one part to each other rank, which forwards it to the other ranks. So
// the root sends the array once, not n-1 times. Only the root knows the size before the headers arrive.
Bytes Collectives::broadcast(Call& call, void* data) {
  const int root = call.signature.root;
  const auto in_one_piece = [&](size_t bytes) { return bytes <= kInlineBytes || size_ == 2; };
  Parts give(size_), take(size_);
  if (rank_ == root && in_one_piece(call.bytes())) {
    const Part whole{0, call.bytes()};
    if (uses_tree(call.signature)) Tree{size_, root}.for_each_child(root, [&](int r) { give[r] = whole; });
    else give = same_for_all(call.bytes());
  }
  exchange_calls(call, data, give);
  const fl_signature& root_call = call_of(call, root);
  if (uses_tree(root_call) != uses_tree(call.signature)) {  // the root's header may have no data
    throw Failure(FL_FAILED, {}, "a broadcast with FL_ANY needs part_of");
  }
  const size_t bytes = static_cast<size_t>(root_call.count) * root_call.itemsize;
  Bytes output_bytes;
  if (call.signature.ndim == FL_ANY) output_bytes = make_bytes(bytes);
  char* const array = output_bytes.data != nullptr ? output_bytes.data.get() : static_cast<char*>(data);
  if (in_one_piece(bytes)) {
    if (rank_ != root) take[root] = {0, bytes};
    deliver(call, data, give, array, take);
    return output_bytes;
  }
  const Parts parts = parts_for_others(bytes, size_, root);
  if (rank_ == root) {
    send_parts(call, array, bytes, parts);
  } else {
    forward_part(call, array, parts);
  }
  return output_bytes;
}

void Collectives::send_parts(Call& call, const void* data, size_t bytes, const Parts& parts) {
  const Buffer whole = mesh_.buffer(data, bytes);
  std::vector<int> sent;
  for_each_piece(longest(parts), [&](size_t at, size_t) {
    for (int r = 0; r < size_; ++r) {
      if (r == rank_ || at >= parts[r].bytes) continue;
      whole->send(r, kPartSlot, parts[r].begin + at, std::min(kChunkBytes, parts[r].bytes - at));
      sent.push_back(r);
    }
  });
  for (int r : sent) call.waiter.sent(*whole, r);
}

void Collectives::forward_part(Call& call, char* data, const Parts& parts) {
  const int root = call.signature.root;
  const Part& own_part = parts[rank_];
  const Buffer forwarded = mesh_.buffer(data + own_part.begin, own_part.bytes);
  std::vector<Buffer> arrivals(size_);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const Part& part = r == root ? own_part : parts[r];
    arrivals[r] = mesh_.buffer(data + part.begin, part.bytes);
    for_each_piece(part.bytes,
                   [&](size_t at, size_t n) { arrivals[r]->recv(r, kPartSlot, at, n); });
  }
  std::vector<int> sent;
  for_each_piece(own_part.bytes, [&](size_t at, size_t n) {
    call.waiter.received(*arrivals[root], root);
    for (int step = 1; step < size_; ++step) {
      const int r = (rank_ + step) % size_;
      if (r == root) continue;
      forwarded->send(r, kPartSlot, at, n);
      sent.push_back(r);
    }
  });
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || r == root) continue;
    for_each_piece(parts[r].bytes, [&](size_t, size_t) { call.waiter.received(*arrivals[r], r); });
  }
  for (int r : sent) call.waiter.sent(*forwarded, r);
}

Bytes Collectives::all_gather(Call& call, const void* data, const fl_room* room) {
  return gather_to(call, data, true, same_for_all(call.bytes()), room);
}

Bytes Collectives::gather(Call& call, const void* data, const fl_room* room) {
  Parts give(size_);
  give[call.signature.root] = {0, call.bytes()};
  return gather_to(call, data, rank_ == call.signature.root, give, room);
}

Bytes Collectives::gather_to(Call& call, const void* data, bool wanted, const Parts& give, const fl_room* room) {
  exchange_calls(call, data, give);
  const Parts take = adjacent_parts(size_, [&](int r) {
    return wanted ? static_cast<size_t>(call_of(call, r).count) * call.signature.itemsize : 0;
  });
  const size_t total = take.back().begin + take.back().bytes;
  Bytes output;
  bool fits = room != nullptr && room->bytes == total;
  for (int r = 0; r < size_; ++r) {  // a rank may send only the number of its rows: see _Withheld in native.py
    fits = fits && (call_of(call, r).count > 0 || call_of(call, r).shape[0] == 0);
  }
  if (wanted && !fits) output = make_bytes(total);
  deliver(call, data, give, fits ? room->data : output.data.get(), take);
  return output;
}

// Only the root knows the size of a part before the headers arrive.
Bytes Collectives::scatter(Call& call, const void* data, void* output) {
  const int root = call.signature.root;
  Parts give(size_), take(size_);
  if (rank_ == root) give = equal_sections(call.bytes());
  exchange_calls(call, data, give);
  const fl_signature& root_call = call_of(call, root);
  take[root] = {0, static_cast<size_t>(root_call.count) * root_call.itemsize};
  Bytes part;
  if (output == nullptr) part = make_bytes(take[root].bytes);
  deliver(call, data, give, output != nullptr ? output : part.data.get(), take);
  return part;
}

void Collectives::all_to_all(Call& call, const void* data, void* output) {
  const Parts sections = equal_sections(call.bytes() / size_);
  exchange_calls(call, data, sections);
  deliver(call, data, sections, output, sections);
}

void Collectives::all_to_all_uneven(Call& call, const fl_sections& sections, void* output) {
  const Parts give = adjacent_parts(size_, [&](int r) { return sections.bytes[rank_ * size_ + r]; });
  const Parts take = adjacent_parts(size_, [&](int r) { return sections.bytes[r * size_ + rank_]; });
  exchange_calls(call, sections.data, give);
  deliver(call, sections.data, give, output, take);
}

}  // namespace fl
