// The collectives that combine the ranks' arrays.

#include "../reduce/reduce.h"
#include "collectives.h"

namespace fl {
namespace {

// A part has so many pieces at least, if they are not too small: what is combined is sent on while the
// rest is on the wire.
constexpr size_t kPieces = 8, kLeastPiece = 64 << 10;

// So many pieces of each rank can arrive unasked, if they fit in the memory for those of all.
constexpr size_t kMostPlaces = 8, kOfAll = 8 << 20;

// Two ranks exchange so much in one step, and reduce it twice; of more, half the additions count more than
// a step.
constexpr size_t kInOneStep = 4 << 20;

// Who gets the reduced parts, where it is not one rank.
constexpr int kEverybody = -2;

// Memory for a piece of one rank.
size_t place_bytes(int ranks) {
  return std::max(kOfAll / ranks / kMostPlaces / kLeastPiece * kLeastPiece, kLeastPiece);
}

size_t places(int ranks) {
  return std::clamp<size_t>(kOfAll / ranks / place_bytes(ranks), 2, kMostPlaces);
}

size_t piece_bytes(const Parts& parts, const fl_signature& mine) {
  const size_t most = place_bytes(static_cast<int>(parts.size()));
  return std::clamp(longest(parts) / kPieces, kLeastPiece, most) / mine.itemsize * mine.itemsize;
}

// A part for each rank but `without`.
Parts even_parts(const fl_signature& mine, int ranks, int without = -1) {
  const size_t count = static_cast<size_t>(mine.count), item = mine.itemsize;
  const size_t among = without < 0 ? ranks : ranks - 1;
  size_t i = 0;
  return in_a_row(ranks, [&](int r) {
    if (r == without) return size_t{0};
    return (count / among + (i++ < count % among ? 1 : 0)) * item;
  });
}

}  // namespace

// A direct reduce-scatter (rank p gets part p of every rank and reduces in rank order), after
// which every part goes to those who want it.
//
// The next pieces of every part are on the wire while one is being reduced. A collecting rank gets a reduced
// piece into the place it came from: its owner can only send it after it has received that place's old
// contents from everybody, so nothing unsent is lost.
class Collectives::ReductionInParts {
 public:
  // `output` takes this rank's reduced part; null: it only passes through, on its way to the
  // collector.
  ReductionInParts(Collectives& group, Call& call, const void* data, char* output, Parts parts, int collector)
      : group_(group),
        waiter_(call.waiter),
        mine_(call.mine),
        rank_(group.rank_),
        size_(group.size_),
        collector_(collector),
        parts_(std::move(parts)),
        piece_bytes_(piece_bytes(parts_, mine_)),
        depth_(places(size_)),
        first_(group.taken_),
        in_place_(output == data && collector == kNobody),
        data_(static_cast<char*>(const_cast<void*>(data))),
        output_(output),
        sends_(group.mesh_.buffer(data, call.bytes())),
        results_(output != nullptr ? group.mesh_.buffer(output, parts_[rank_].bytes)
                                   : group.mesh_.buffer(group.room(rank_).ptr, group.room(rank_).size)),
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
  // Bytes of piece `c` of rank r's part; none where the part has ended.
  Part piece(int r, size_t c) const {
    const size_t begin = std::min(c * piece_bytes_, parts_[r].bytes);
    return {parts_[r].begin + begin, std::min(piece_bytes_, parts_[r].bytes - begin)};
  }
  size_t place(size_t c) const { return (first_ + c) % depth_ * place_bytes(size_); }
  bool collects(int r) const { return collector_ == kEverybody || collector_ == r; }
  int peer(int step) const { return (rank_ + step) % size_; }

  void start(size_t c) {
    for (int step = 1; step < size_; ++step) {
      const int r = peer(step);
      const Part theirs = piece(r, c);
      if (theirs.bytes == 0) continue;
      if (collects(rank_)) collected_[r]->recv(r, kPartSlot, c * piece_bytes_, theirs.bytes);
      sends_->send(r, kReduceSlot, theirs.begin, theirs.bytes);
      sent_.push_back(r);
    }
  }

  void combine(size_t c) {
    const Part own = piece(rank_, c);
    if (own.bytes == 0) return;
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) waiter_.received(group_.room(r), r);
      const char* came = static_cast<const char*>(group_.room(r).ptr) + place(c);
      from_[r] = r == rank_ ? data_ + own.begin : came;
    }
    if (in_place_) waiter_.sent(*sends_, sent_[c]);
    if (output_ == nullptr && c >= depth_) waiter_.sent(*results_, given_[c - depth_]);
    const size_t at = output_ != nullptr ? c * piece_bytes_ : place(c);
    char* result = static_cast<char*>(results_->ptr) + at;
    fl::reduce(mine_.dtype, mine_.op, mine_.scale, result, from_.data(), size_, own.bytes / mine_.itemsize);
    group_.ask_for_piece(place(c));
    ++group_.taken_;
    for (int step = 1; step < size_; ++step) {
      if (!collects(peer(step))) continue;
      results_->send(peer(step), kPartSlot, at, own.bytes);
      given_.push_back(peer(step));
    }
  }

  void finish() {
    for (size_t i = 0; i < sent_.size() && !in_place_; ++i) waiter_.sent(*sends_, sent_[i]);
    const size_t passed = output_ != nullptr ? 0 : given_.size() - std::min(given_.size(), depth_);
    for (size_t i = passed; i < given_.size(); ++i) waiter_.sent(*results_, given_[i]);
    if (!collects(rank_)) return;
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      for (size_t c = 0; piece(r, c).bytes > 0; ++c) waiter_.received(*collected_[r], r);
    }
  }

  Collectives& group_;
  Waiter& waiter_;
  const fl_signature& mine_;
  const int rank_, size_, collector_;
  const Parts parts_;
  const size_t piece_bytes_, depth_;  // of each part so many pieces are on the wire or being reduced
  const size_t first_;                // where in the rooms the first one arrives
  const bool in_place_;               // what is sent is overwritten by the result
  char* const data_;
  char* const output_;
  const Buffer sends_, results_;
  std::vector<Buffer> collected_;
  std::vector<const void*> from_;
  std::vector<int> sent_, given_;  // to whom, of what is to be waited for
};

// What comes from rank r; nothing does from this rank itself: its own room is free.
gloo::transport::UnboundBuffer& Collectives::room(int r) { return *rooms_[r]; }

void Collectives::make_rooms() {
  const size_t bytes = place_bytes(size_) * places(size_);
  scratch_.reset(new char[size_ * bytes]);
  for (int r = 0; r < size_; ++r) rooms_.push_back(mesh_.buffer(scratch_.get() + r * bytes, bytes));
  for (size_t at = 0; at < bytes; at += place_bytes(size_)) ask_for_piece(at);
}

// Ahead of time, as for headers: a piece is sent as soon as it is known that all call the same.
void Collectives::ask_for_piece(size_t at) {
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) mesh_.ask(room(r), r, kReduceSlot, at, place_bytes(size_));
  }
}

void Collectives::reduce_in_parts(Call& call, const void* data, char* output, const Parts& parts, int collector) {
  if (rooms_.empty()) make_rooms();
  ReductionInParts(*this, call, data, output, parts, collector).run();
}

void Collectives::reduce_inline(const Call& call, const void* data, size_t skip, size_t count, void* into) {
  fetch(same_for_all(count * call.mine.itemsize));
  std::vector<const void*> from(size_);
  for (int r = 0; r < size_; ++r) from[r] = payload(r);
  from[rank_] = static_cast<const char*>(data) + skip;
  fl::reduce(call.mine.dtype, call.mine.op, call.mine.scale, into, from.data(), size_, count);
}

// Small: everybody has everybody's data and reduces it, and so do two ranks of more, which then send no
// more than otherwise. Large: bytes sent per rank are 2 (n-1)/n of the array, as for a ring, in 2 steps
// instead of 2 (n-1), and with a sum that does not depend on where in the ring a part began.
void Collectives::all_reduce(Call& call, void* data) {
  const bool small = call.bytes() * (size_ - 1) <= kInlineBytes;
  meet(call, data, same_for_all(small ? call.bytes() : 0));
  if (small) reduce_inline(call, data, 0, call.mine.count, data);
  await_given();
  if (small) return;
  if (size_ == 2 && call.bytes() <= kInOneStep) {
    return reduce_in_parts(call, data, static_cast<char*>(data), same_for_all(call.bytes()), kNobody);
  }
  const Parts parts = even_parts(call.mine, size_);
  char* own = static_cast<char*>(data) + parts[rank_].begin;
  reduce_in_parts(call, data, own, parts, kEverybody);
}

// Large: the others reduce a part each, so that every link carries the array once in each direction: the
// root gives its own and gets the result. Of two ranks the root reduces all, and gives nothing.
void Collectives::reduce(Call& call, void* data) {
  const int root = call.mine.root;
  const bool small = call.bytes() <= kInlineBytes;
  Parts give(size_);
  if (small) give[root] = {0, call.bytes()};
  meet(call, data, give);
  if (small && rank_ == root) reduce_inline(call, data, 0, call.mine.count, data);
  await_given();
  if (small) return;
  Parts parts = even_parts(call.mine, size_, root);
  if (size_ == 2) {
    parts[root] = {0, call.bytes()};
    parts[1 - root] = {0, 0};
  }
  char* own = rank_ == root ? static_cast<char*>(data) + parts[root].begin : nullptr;
  reduce_in_parts(call, data, own, parts, root);
}

void Collectives::reduce_scatter(Call& call, const void* data, void* output) {
  const size_t count = static_cast<size_t>(call.mine.count) / size_;
  reduce_sections(call, data, output, equal_sections(count * call.mine.itemsize));
}

void Collectives::reduce_scatter_uneven(Call& call, const fl_sections& sections, void* output) {
  reduce_sections(call, sections.data, output, in_a_row(size_, [&](int r) { return sections.bytes[r]; }));
}

// Small where all parts are: every rank must choose alike.
void Collectives::reduce_sections(Call& call, const void* data, void* output, const Parts& sections) {
  const bool small = std::all_of(sections.begin(), sections.end(), [](const Part& part) {
    return part.bytes <= kInlineBytes;
  });
  meet(call, data, small ? sections : same_for_all(0));
  const Part& own = sections[rank_];
  if (small) reduce_inline(call, data, own.begin, own.bytes / call.mine.itemsize, output);
  await_given();
  if (small) return;
  reduce_in_parts(call, data, static_cast<char*>(output), sections, kNobody);
}

}  // namespace fl
