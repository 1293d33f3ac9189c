// The verbs in which each rank has something else for every other: reduce_scatter, scatter,
// all_to_all.
#include <algorithm>
#include <cstring>

#include "../reduce/reduce.h"
#include "collectives.h"

namespace fl {
namespace {

// How a section travels: in pieces, one in each chunk.
struct Way {
  size_t bytes = 0;     // of the section
  size_t piece = 0;     // bytes of a piece
  size_t in_array = 0;  // where the section begins
  size_t in_slot = 0;   // where its pieces lie

  size_t begin(uint32_t chunk) const { return std::min(bytes, chunk * piece); }
  size_t size(uint32_t chunk) const { return std::min(piece, bytes - begin(chunk)); }
};

size_t whole_lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

// What each rank has for each. Every section is cut into as many pieces as there are chunks, so that
// all arrive evenly, however much their lengths differ.
struct Collectives::Sections {
  int ranks, rank;
  size_t equal = 0;                 // bytes of every section, or
  const int64_t* uneven = nullptr;  // those of each: [source * ranks + destination]
  int only_source = -1;             // the others have nothing; -1: all have
  uint32_t chunks = 0;
  std::vector<Way> give{}, take{};  // by destination, by source

  size_t bytes(int source, int destination) const {
    if (only_source >= 0 && source != only_source) return 0;
    return uneven != nullptr ? static_cast<size_t>(uneven[source * ranks + destination]) : equal;
  }

  size_t bytes_of(int source) const {
    size_t all = 0;
    for (int d = 0; d < ranks; ++d) all += bytes(source, d);
    return all;
  }

  size_t most_bytes() const {
    size_t most = 0;
    for (int s = 0; s < ranks; ++s) most = std::max(most, bytes_of(s));
    return most;
  }

  // Decide how all sections travel; the same on every rank.
  void cut(size_t chunk_bytes) {
    const size_t room = chunk_bytes - ranks * kLine;  // pieces end with a line
    chunks = 1;
    for (int s = 0; s < ranks; ++s) {
      const size_t travelling = bytes_of(s) - bytes(s, s);
      chunks = std::max(chunks, static_cast<uint32_t>((travelling + room - 1) / room));
    }
    give.resize(ranks);
    take.resize(ranks);
    size_t given = 0, taken = 0;
    for (int r = 0; r < ranks; ++r) {
      give[r] = way(rank, r, given);
      take[r] = way(r, rank, taken);
      given += give[r].bytes;
      taken += take[r].bytes;
    }
  }

 private:
  size_t piece(int source, int destination) const {
    return whole_lines((bytes(source, destination) + chunks - 1) / chunks);
  }

  Way way(int source, int destination, size_t in_array) const {
    Way way{bytes(source, destination), piece(source, destination), in_array, 0};
    for (int d = 0; d < destination; ++d) way.in_slot += d == source ? 0 : piece(source, d);
    return way;
  }
};

// Fill this rank's slots with what is for the others. `consume` is told when the pieces of a chunk
// from all sources lie at from_.
void Collectives::stream_sections(const Sections& sections, const void* data,
                                  const std::function<void(uint32_t)>& consume) {
  const char* array = static_cast<const char*>(data);
  const auto produce = [&](uint32_t c, char* slot) {
    for (int r = 0; r < size_; ++r) {
      const Way& way = sections.give[r];
      if (r != rank_) show(slot + way.in_slot, array + way.in_array + way.begin(c), way.size(c));
    }
  };
  const auto gather = [&](uint32_t c, uint32_t filled) {
    const Way& own = sections.give[rank_];
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) {
        from_[r] = array + own.in_array + own.begin(c);
        continue;
      }
      if (sections.take[r].size(c) > 0) watch_.wait(segment_.block(r).filled, filled, r);
      from_[r] = segment_.slot(r, filled - 1) + sections.take[r].in_slot;
    }
    consume(c);
  };
  const bool produces = sections.bytes_of(rank_) > 0;
  stream(sections.chunks, produces, true, produce, gather);
}

void Collectives::move_sections(Sections sections, const void* data, void* output) {
  sections.cut(segment_.chunk_bytes());
  char* into = static_cast<char*>(output);
  stream_sections(sections, data, [&](uint32_t c) {
    for (int r = 0; r < size_; ++r) {
      const Way& way = sections.take[r];
      if (way.size(c) == 0) continue;
      std::memcpy(into + way.in_array + way.begin(c), from_[r], way.size(c));
    }
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
  Sections sections{size_, rank_, part * item};
  sections.cut(segment_.chunk_bytes());
  const Way& own = sections.give[rank_];
  stream_sections(sections, data, [&](uint32_t c) {
    fl::reduce(mine.dtype, mine.op, mine.scale, static_cast<char*>(output) + own.begin(c),
               from_.data(), size_, own.size(c) / item);
  });
}

void Collectives::all_to_all(const fl_signature& mine, const void* data, void* output) {
  const size_t section = static_cast<size_t>(mine.count) / size_ * mine.itemsize;
  exchange_sections(mine, {size_, rank_, section}, data, output);
}

void Collectives::all_to_all_uneven(const fl_signature& mine, const fl_sections& given,
                                    void* output) {
  exchange_sections(mine, {size_, rank_, 0, given.bytes}, given.data, output);
}

void Collectives::exchange_sections(const fl_signature& mine, const Sections& sections,
                                    const void* data, void* output) {
  if (sections.most_bytes() > kInlineBytes) {
    enter(mine, data, 0);
    return move_sections(sections, data, output);
  }
  enter(mine, data, sections.bytes_of(rank_));
  char* into = static_cast<char*>(output);
  for (int r = 0; r < size_; ++r) {
    const size_t bytes = sections.bytes(r, rank_);
    if (bytes == 0) continue;
    const char* theirs = r == rank_ ? static_cast<const char*>(data)
                                    : inline_data(r, sections.bytes_of(r));
    for (int d = 0; d < rank_; ++d) theirs += sections.bytes(r, d);
    std::memcpy(into, theirs, bytes);
    into += bytes;
  }
}

// The root's signature tells of one part; what the others know of it may be nothing.
Bytes Collectives::scatter(const fl_signature& mine, const void* data, void* output) {
  const int root = mine.root;
  const bool is_root = rank_ == root;
  const size_t known = is_root ? static_cast<size_t>(mine.count) * mine.itemsize * size_ : 0;
  enter(mine, data, known <= kInlineBytes ? known : 0);
  const fl_signature& told = call_of(root).signature;
  const size_t part = static_cast<size_t>(told.count) * told.itemsize;
  Bytes made;
  if (output == nullptr) {
    made = make_bytes(part);
    output = made.data.get();
  }
  if (part * size_ > kInlineBytes) {
    move_sections({size_, rank_, part, nullptr, root}, data, output);
  } else if (part > 0) {
    const char* whole =
        is_root ? static_cast<const char*>(data) : inline_data(root, part * size_);
    std::memcpy(output, whole + rank_ * part, part);
  }
  return made;
}

}  // namespace fl
