// Collectives that reduce arrays.

#include "../reduce/reduce.h"
#include "collectives.h"

namespace fl {
namespace {

// kPieces: minimum number of chunks per part, so that reductions overlap transfers. A part has fewer chunks
// if they would otherwise be smaller than kLeastPiece bytes.
constexpr size_t kPieces = 8, kLeastPiece = 64 << 10;

// Maximum number of requested chunks per rank, and maximum bytes of the requested chunks of all ranks.
constexpr size_t kMostSlots = 8, kAllBytes = 8 << 20;

// Maximum bytes of an array that two ranks exchange completely, so that both reduce it. A larger array takes
// two steps, but each rank reduces only half of the elements, which saves more time.
constexpr size_t kInOneStep = 4 << 20;

// Value of `collector` if all ranks receive the reduced parts.
constexpr int kAllRanks = -2;

// Return the bytes of memory that are reserved for one chunk from one rank.
size_t slot_bytes(int ranks) {
  return std::max(kAllBytes / ranks / kMostSlots / kLeastPiece * kLeastPiece, kLeastPiece);
}

size_t slot_count(int ranks) {
  return std::clamp<size_t>(kAllBytes / ranks / slot_bytes(ranks), 2, kMostSlots);
}

size_t piece_bytes(const Parts& parts, const fl_signature& signature) {
  const size_t most = slot_bytes(static_cast<int>(parts.size()));
  return std::clamp(longest(parts) / kPieces, kLeastPiece, most) / signature.itemsize * signature.itemsize;
}

// Divide the array into a part for each rank except `without`.
Parts even_parts(const fl_signature& signature, int ranks, int without = -1) {
  const size_t count = static_cast<size_t>(signature.count), item = signature.itemsize;
  const size_t among = without < 0 ? ranks : ranks - 1;
  size_t i = 0;
  return adjacent_parts(ranks, [&](int r) {
    if (r == without) return size_t{0};
    return (count / among + (i++ < count % among ? 1 : 0)) * item;
  });
}

}  // namespace

// A direct reduce-scatter: rank p receives part p from every rank and reduces it in rank order. Then it sends
// the reduced part to the collecting ranks.
//
// While one chunk is reduced, the next chunks are sent. A collecting rank receives reduced chunks into its own
// array. This loses no data: a rank reduces a chunk only after it has received the collecting rank's chunk.
class Collectives::ReductionInParts {
 public:
  // `output` receives this rank's reduced part. If it is null, the part is only sent to the collector.
  ReductionInParts(Collectives& group, Call& call, const void* data, char* output, Parts parts, int collector)
      : group_(group),
        waiter_(call.waiter),
        signature_(call.signature),
        rank_(group.rank_),
        size_(group.size_),
        collector_(collector),
        parts_(std::move(parts)),
        piece_bytes_(piece_bytes(parts_, signature_)),
        depth_(slot_count(size_)),
        first_(group.taken_),
        in_place_(output == data && collector == kNoPeer),
        data_(static_cast<char*>(const_cast<void*>(data))),
        output_(output),
        sends_(group.mesh_.buffer(data, call.bytes())),
        results_(output != nullptr ? group.mesh_.buffer(output, parts_[rank_].bytes)
                                   : group.mesh_.buffer(group.rooms_[rank_]->ptr, group.rooms_[rank_]->size)),
        collected_(size_),
        from_(size_) {
    for (int r = 0; r < size_ && collects(rank_); ++r) {
      collected_[r] = group.mesh_.buffer(data_ + parts_[r].begin, parts_[r].bytes);
    }
  }

  void run() {
    const size_t rounds = (longest(parts_) + piece_bytes_ - 1) / piece_bytes_;
    size_t started = 0;
    for (size_t c = 0; c < rounds; ++c) {
      while (started < std::min(c + depth_, rounds)) start(started++);
      combine(c);
    }
    finish();
  }

 private:
  // Return chunk `c` of rank r's part. It is empty if the part has fewer chunks.
  Part piece(int r, size_t c) const {
    const size_t begin = std::min(c * piece_bytes_, parts_[r].bytes);
    return {parts_[r].begin + begin, std::min(piece_bytes_, parts_[r].bytes - begin)};
  }
  size_t slot_offset(size_t c) const { return (first_ + c) % depth_ * slot_bytes(size_); }
  bool collects(int r) const { return collector_ == kAllRanks || collector_ == r; }
  int peer(int step) const { return (rank_ + step) % size_; }

  void start(size_t c) {
    for (int step = 1; step < size_; ++step) {
      const int r = peer(step);
      const Part peer_piece = piece(r, c);
      if (peer_piece.bytes == 0) continue;
      if (collects(rank_)) collected_[r]->recv(r, kPartSlot, c * piece_bytes_, peer_piece.bytes);
      sends_->send(r, kReduceSlot, peer_piece.begin, peer_piece.bytes);
      sent_.push_back(r);
    }
  }

  void combine(size_t c) {
    const Part own_piece = piece(rank_, c);
    if (own_piece.bytes == 0) return;
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) waiter_.received(*group_.rooms_[r], r);
      const char* arrived = static_cast<const char*>(group_.rooms_[r]->ptr) + slot_offset(c);
      from_[r] = r == rank_ ? data_ + own_piece.begin : arrived;
    }
    if (in_place_) waiter_.sent(*sends_, sent_[c]);
    if (output_ == nullptr && c >= depth_) waiter_.sent(*results_, pending_[c - depth_]);
    const size_t at = output_ != nullptr ? c * piece_bytes_ : slot_offset(c);
    char* result = static_cast<char*>(results_->ptr) + at;
    fl::reduce(signature_.dtype, signature_.op, signature_.scale, result, from_.data(), size_,
               own_piece.bytes / signature_.itemsize);
    group_.request_chunk(slot_offset(c));
    ++group_.taken_;
    for (int step = 1; step < size_; ++step) {
      if (!collects(peer(step))) continue;
      results_->send(peer(step), kPartSlot, at, own_piece.bytes);
      pending_.push_back(peer(step));
    }
  }

  void finish() {
    for (size_t i = 0; i < sent_.size() && !in_place_; ++i) waiter_.sent(*sends_, sent_[i]);
    const size_t passed = output_ != nullptr ? 0 : pending_.size() - std::min(pending_.size(), depth_);
    for (size_t i = passed; i < pending_.size(); ++i) waiter_.sent(*results_, pending_[i]);
    if (!collects(rank_)) return;
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      for (size_t c = 0; piece(r, c).bytes > 0; ++c) waiter_.received(*collected_[r], r);
    }
  }

  Collectives& group_;
  Waiter& waiter_;
  const fl_signature& signature_;
  const int rank_, size_, collector_;
  const Parts parts_;
  const size_t piece_bytes_, depth_;  // depth_: maximum number of chunks of a part in transit
  const size_t first_;                // value of taken_ at the start
  const bool in_place_;               // output_ is data_
  char* const data_;
  char* const output_;
  const Buffer sends_, results_;
  std::vector<Buffer> collected_;
  std::vector<const void*> from_;
  std::vector<int> sent_, pending_;  // destinations of chunks of data_, and of results
};

void Collectives::make_rooms() {
  const size_t bytes = slot_bytes(size_) * slot_count(size_);
  scratch_.reset(new char[size_ * bytes]);
  for (int r = 0; r < size_; ++r) rooms_.push_back(mesh_.buffer(scratch_.get() + r * bytes, bytes));
  for (size_t at = 0; at < bytes; at += slot_bytes(size_)) request_chunk(at);
}

// Request a chunk from each rank in advance. Each rank can then send it as soon as it has compared the calls.
void Collectives::request_chunk(size_t at) {
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) mesh_.request(*rooms_[r], r, kReduceSlot, at, slot_bytes(size_));
  }
}

void Collectives::reduce_in_parts(Call& call, const void* data, char* output, const Parts& parts, int collector) {
  if (rooms_.empty()) make_rooms();
  ReductionInParts(*this, call, data, output, parts, collector).run();
}

// Reduce the arrays that were sent with the calls, in rank order. After sum_by_hosts(), reduce each host first.
void Collectives::reduce_inline(const Call& call, const void* data, size_t skip, size_t count, void* into) {
  fetch(same_for_all(count * call.signature.itemsize));
  std::vector<const void*> from(size_);
  for (int r = 0; r < size_; ++r) from[r] = payload(r);
  from[rank_] = static_cast<const char*>(data) + skip;
  const fl_signature& s = call.signature;
  // A 16-bit mean is scaled on each host, because the sum over all hosts could overflow.
  const bool scales_first = !host_of_.empty() && is_narrow(s.dtype) && s.op == FL_SUM && std::abs(s.scale) <= 1;
  std::map<int, std::vector<const void*>> hosts;
  for (size_t r = 0; r < host_of_.size(); ++r) hosts[host_of_[r]].push_back(from[r]);
  std::vector<char> sums(hosts.size() * count * s.itemsize);
  if (!hosts.empty()) from.clear();
  for (const auto& [host, arrays] : hosts) {
    char* const sum = sums.data() + host * count * s.itemsize;
    from.push_back(sum);
    fl::reduce(s.dtype, s.op, scales_first ? s.scale : 1.0, sum, arrays.data(), arrays.size(), count);
  }
  fl::reduce(s.dtype, s.op, scales_first ? 1.0 : s.scale, into, from.data(), from.size(), count);
}

// If the array is small, or if it has at most kInOneStep bytes and there are two ranks, each rank sends its
// array to all ranks and reduces all arrays. Otherwise each rank sends 2 (n-1)/n times the bytes of the
// array, as in a ring. But it needs only 2 steps instead of 2 (n-1), and adds the elements in rank order.
void Collectives::all_reduce(Call& call, void* data) {
  const bool small = call.bytes() * (size_ - 1) <= kInlineBytes;
  exchange_calls(call, data, same_for_all(small ? call.bytes() : 0));
  if (small) return reduce_inline(call, data, 0, call.signature.count, data);
  if (size_ == 2 && call.bytes() <= kInOneStep) {
    return reduce_in_parts(call, data, static_cast<char*>(data), same_for_all(call.bytes()), kNoPeer);
  }
  const Parts parts = even_parts(call.signature, size_);
  char* own_piece = static_cast<char*>(data) + parts[rank_].begin;
  reduce_in_parts(call, data, own_piece, parts, kAllRanks);
}

// If the array is large, every rank except the root reduces a part. So each link carries the array once per
// direction: the root sends its data and receives the result. With two ranks, the root reduces everything.
void Collectives::reduce(Call& call, void* data) {
  const int root = call.signature.root;
  const bool small = call.bytes() <= kInlineBytes;
  Parts give(size_);
  if (small) give[root] = {0, call.bytes()};
  exchange_calls(call, data, give);
  if (small && rank_ == root) reduce_inline(call, data, 0, call.signature.count, data);
  if (small) return;
  Parts parts = even_parts(call.signature, size_, root);
  if (size_ == 2) {
    parts[root] = {0, call.bytes()};
    parts[1 - root] = {0, 0};
  }
  char* own_piece = rank_ == root ? static_cast<char*>(data) + parts[root].begin : nullptr;
  reduce_in_parts(call, data, own_piece, parts, root);
}

void Collectives::reduce_scatter(Call& call, const void* data, void* output) {
  const size_t count = static_cast<size_t>(call.signature.count) / size_;
  reduce_sections(call, data, output, equal_sections(count * call.signature.itemsize));
}

void Collectives::reduce_scatter_uneven(Call& call, const fl_sections& sections, void* output) {
  reduce_sections(call, sections.data, output, adjacent_parts(size_, [&](int r) { return sections.bytes[r]; }));
}

// Small parts are sent with the headers only if all parts are small, so that all ranks do the same.
void Collectives::reduce_sections(Call& call, const void* data, void* output, const Parts& sections) {
  const bool small = std::all_of(sections.begin(), sections.end(), [](const Part& part) {
    return part.bytes <= kInlineBytes;
  });
  exchange_calls(call, data, small ? sections : same_for_all(0));
  const Part& own_piece = sections[rank_];
  if (small) return reduce_inline(call, data, own_piece.begin, own_piece.bytes / call.signature.itemsize, output);
  reduce_in_parts(call, data, static_cast<char*>(output), sections, kNoPeer);
}

}  // namespace fl
