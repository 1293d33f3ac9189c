// Verbs in which each rank has different data for every other rank: reduce_scatter, scatter, all_to_all.

#include "../common/signature.h"
#include "../reduce/reduce.h"
#include "collectives.h"
#include "../common/copying.h"

namespace fl {
namespace {

size_t whole_lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// The path of a section through the slots: one piece in each chunk.
struct Route {
  size_t bytes = 0;     // of the section
  size_t in_array = 0;  // offset in the array
  size_t piece = 0;     // bytes of a piece
  size_t in_slot = 0;   // offset of its pieces in a slot

  size_t begin(uint32_t chunk) const { return std::min(bytes, chunk * piece); }
  size_t size(uint32_t chunk) const { return std::min(piece, bytes - begin(chunk)); }
};

}  // namespace

// The sizes of the sections between all ranks.
struct Collectives::Sections {
  int ranks;
  size_t equal = 0;                 // bytes of every section, or
  const int64_t* uneven = nullptr;  // of each: [source * ranks + destination]
  int only_source = -1;             // other ranks send nothing; -1: all ranks send

  size_t bytes(int source, int destination) const {
    if (only_source >= 0 && source != only_source) return 0;
    return uneven != nullptr ? static_cast<size_t>(uneven[source * ranks + destination]) : equal;
  }

  // Offset of a section in the source's array; with `ranks` as destination: the end of the array.
  size_t begin(int source, int destination) const {
    size_t before = 0;
    for (int d = 0; d < destination; ++d) before += bytes(source, d);
    return before;
  }

  size_t bytes_of(int source) const { return begin(source, ranks); }

  size_t most_bytes() const {
    size_t most = 0;
    for (int s = 0; s < ranks; ++s) most = std::max(most, bytes_of(s));
    return most;
  }
};

// Routes of all sections from and to one rank. Each section has as many pieces as there are chunks, so that
// all sections arrive evenly whatever their lengths.
struct Collectives::Routes {
  uint32_t chunks = 1;
  std::vector<Route> give, take;  // by destination, by source

  Routes(const Sections& sections, int rank, size_t chunk_bytes) {
    const int ranks = sections.ranks;
    const size_t room = chunk_bytes - ranks * kLine;  // pieces end with a line
    for (int s = 0; s < ranks; ++s) {
      const size_t travels = sections.bytes_of(s) - sections.bytes(s, s);
      chunks = std::max(chunks, static_cast<uint32_t>((travels + room - 1) / room));
    }
    size_t taken = 0;
    for (int r = 0; r < ranks; ++r) {
      give.push_back(route(sections, rank, r));
      take.push_back(route(sections, r, rank));
      take[r].in_array = taken;
      taken += take[r].bytes;
    }
  }

 private:
  Route route(const Sections& sections, int source, int destination) const {
    const auto piece = [&](int d) {
      return whole_lines((sections.bytes(source, d) + chunks - 1) / chunks);
    };
    Route route{sections.bytes(source, destination), sections.begin(source, destination), piece(destination), 0};
    for (int d = 0; d < destination; ++d) route.in_slot += d == source ? 0 : piece(d);
    return route;
  }
};

Collectives::Given Collectives::sections_in(const fl_signature& mine, const void* data) const {
  if (is_compared(mine)) return {nullptr, 0};
  const auto& given = *static_cast<const fl_sections*>(data);
  const Sections sections{size_, 0, given.bytes};
  const bool fits = sections.most_bytes() <= kInlineBytes;
  return {given.data, fits ? sections.bytes_of(rank_) : 0};
}

Collectives::Routes Collectives::routes_of(const Sections& sections) const {
  const size_t least = 2 * size_ * kLine;
  return Routes(sections, rank_, std::max(least, chunk_for(sections.most_bytes())));
}

// Fill this rank's slots. `consume` is called when from_ points to the pieces of a chunk from all sources.
void Collectives::stream_sections(const Routes& routes, const void* data,
                                  const std::function<void(uint32_t)>& consume) {
  const char* array = static_cast<const char*>(data);
  size_t given = 0;
  for (const Route& route : routes.give) given += route.bytes;
  const auto fill = [&](uint32_t c, char* slot) {
    for (int r = 0; r < size_; ++r) {
      const Route& route = routes.give[r];
      if (r == rank_) continue;
      show(slot + route.in_slot, array + route.in_array + route.begin(c), route.size(c));
    }
  };
  const auto take = [&](uint32_t c, uint32_t filled) {
    for (int r = 0; r < size_; ++r) {
      const Route &own = routes.give[r], &route = routes.take[r];
      if (r != rank_ && route.size(c) > 0) watch_.wait(segment_.block(r).filled, filled, r);
      from_[r] = r == rank_ ? array + own.in_array + own.begin(c)
                            : segment_.slot(r, filled - 1) + route.in_slot;
    }
    consume(c);
  };
  stream(routes.chunks, given > 0, true, fill, take);
}

void Collectives::move_sections(const fl_signature& mine, const Sections& sections, const void* data, void* output) {
  char* into = static_cast<char*>(output);
  if (choose(mine, sections.most_bytes()) == kDirectly) {
    read_sections(sections, static_cast<const char*>(data), into);
  } else {
    const Routes routes = routes_of(sections);
    stream_sections(routes, data, [&](uint32_t c) {
      for (int r = 0; r < size_; ++r) {
        const Route& route = routes.take[r];
        if (route.size(c) == 0) continue;
        copy(into + route.in_array + route.begin(c), from_[r], route.size(c));
      }
    });
  }
  choice_.end(trial_);
}

void Collectives::read_sections(const Sections& sections, const char* data, char* into) {
  for (int r = 0; r < size_; ++r) {
    const size_t bytes = sections.bytes(r, rank_), begin = sections.begin(r, rank_);
    if (r != rank_) {
      read(r, begin, into, bytes);
    } else if (bytes > 0) {
      copy(into, data + begin, bytes);
    }
    into += bytes;
  }
  end_reading();
}

void Collectives::reduce_scatter(const fl_signature& mine, const void* data, void* output) {
  const size_t part = static_cast<size_t>(mine.count) / size_ * mine.itemsize;
  reduce_sections(mine, {size_, part}, data, output);
}

void Collectives::reduce_scatter_uneven(const fl_signature& mine, const fl_sections& given, void* output) {
  reduce_sections(mine, {size_, 0, given.bytes}, given.data, output);
}

void Collectives::reduce_sections(const fl_signature& mine, const Sections& sections,
                                  const void* data, void* output) {
  const size_t item = mine.itemsize, part = sections.bytes(rank_, rank_) / item;
  const size_t bytes = sections.bytes_of(rank_), own = sections.begin(rank_, rank_);
  receive_calls(mine);
  if (bytes <= kInlineBytes) {
    reduce_inline(mine, data, own, part, output);
    return;
  }
  char* into = static_cast<char*>(output);
  if (choose(mine, bytes) == kDirectly) {
    reduce_read(mine, own, static_cast<const char*>(data) + own, part, into);
    end_reading();
  } else {
    const Routes routes = routes_of(sections);
    const Route& route = routes.give[rank_];
    stream_sections(routes, data, [&](uint32_t c) {
      fl::reduce(mine.dtype, mine.op, mine.scale, into + route.begin(c), from_.data(), size_, route.size(c) / item);
    });
  }
  choice_.end(trial_);
}

void Collectives::all_to_all(const fl_signature& mine, const void* data, void* output) {
  const size_t section = static_cast<size_t>(mine.count) / size_ * mine.itemsize;
  exchange_sections(mine, {size_, section}, data, output);
}

void Collectives::all_to_all_uneven(const fl_signature& mine, const fl_sections& given, void* output) {
  exchange_sections(mine, {size_, 0, given.bytes}, given.data, output);
}

void Collectives::exchange_sections(const fl_signature& mine, const Sections& sections,
                                    const void* data, void* output) {
  receive_calls(mine);
  if (sections.most_bytes() > kInlineBytes) return move_sections(mine, sections, data, output);
  char* into = static_cast<char*>(output);
  for (int r = 0; r < size_; ++r) {
    const size_t bytes = sections.bytes(r, rank_);
    if (bytes == 0) continue;
    const char* theirs = r == rank_ ? static_cast<const char*>(data) : inline_data(r, sections.bytes_of(r));
    copy(into, theirs + sections.begin(r, rank_), bytes);
    into += bytes;
  }
}

// The root's signature describes one part. Other ranks may not know it.
Bytes Collectives::scatter(const fl_signature& mine, const void* data, void* output) {
  const int root = mine.root;
  const bool is_root = rank_ == root;
  receive_calls(mine);
  const fl_signature& given = description_of(root, calls_).signature;
  const size_t part = static_cast<size_t>(given.count) * given.itemsize;
  Bytes made;
  if (output == nullptr) {
    made = make_bytes(part);
    output = made.data.get();
  }
  if (part * size_ > kInlineBytes) {
    move_sections(mine, {size_, part, nullptr, root}, data, output);
  } else if (part > 0) {
    const char* whole = is_root ? static_cast<const char*>(data) : inline_data(root, part * size_);
    copy(output, whole + rank_ * part, part);
  }
  return made;
}

}  // namespace fl
