// Verbs in which each rank has different data for every other rank: reduce_scatter, scatter, all_to_all.

#include "../common/signature.h"
#include "../reduce/reduce.h"
#include "collectives.h"
#include "../common/copying.h"

namespace fl {
namespace {

size_t whole_lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// Position of a section in the array and in the slots. Each chunk contains one piece of the section.
struct Route {
  size_t bytes = 0;
  size_t in_array = 0;
  size_t piece = 0;    // bytes of the section in one chunk
  size_t in_slot = 0;  // offset of the pieces in a slot

  size_t begin(uint32_t chunk) const { return std::min(bytes, chunk * piece); }
  size_t size(uint32_t chunk) const { return std::min(piece, bytes - begin(chunk)); }
};

}  // namespace

// Sizes of the sections from each rank to each rank.
struct Collectives::Sections {
  int ranks;
  size_t equal = 0;                 // bytes of each section if `uneven` is null
  const int64_t* uneven = nullptr;  // bytes; index: source * ranks + destination
  int only_source = -1;             // the only rank that sends; -1: all ranks send

  size_t bytes(int source, int destination) const {
    if (only_source >= 0 && source != only_source) return 0;
    return uneven != nullptr ? static_cast<size_t>(uneven[source * ranks + destination]) : equal;
  }

  // Return the offset of a section in the source's array, or the array's size if `destination` is `ranks`.
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

// Routes of all sections from and to one rank. Each section has one piece in every chunk, so that sections of
// all sizes are complete with the last chunk.
struct Collectives::Routes {
  uint32_t chunks = 1;
  std::vector<Route> give, take;  // give: one per destination; take: one per source

  Routes(const Sections& sections, int rank, size_t chunk_bytes) {
    const int ranks = sections.ranks;
    const size_t room = chunk_bytes - ranks * kLine;  // each piece is rounded up to cache lines
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

Collectives::Outgoing Collectives::sections_in(const fl_signature& signature, const void* data) const {
  if (is_compared(signature)) return {nullptr, 0};
  const auto& sections_data = *static_cast<const fl_sections*>(data);
  const Sections sections{size_, 0, sections_data.bytes};
  const bool fits = sections.most_bytes() <= kInlineBytes;
  return {sections_data.data, fits ? sections.bytes_of(rank_) : 0};
}

Collectives::Routes Collectives::routes_of(const Sections& sections) const {
  const size_t least = 2 * size_ * kLine;
  return Routes(sections, rank_, std::max(least, chunk_for(sections.most_bytes())));
}

// For each chunk: fill this rank's slot, wait for other slots, set from_ to the pieces, and call `consume`.
void Collectives::stream_sections(const Routes& routes, const void* data,
                                  const std::function<void(uint32_t)>& consume) {
  const char* array = static_cast<const char*>(data);
  size_t sent_bytes = 0;
  for (const Route& route : routes.give) sent_bytes += route.bytes;
  const auto fill = [&](uint32_t c, char* slot) {
    for (int r = 0; r < size_; ++r) {
      const Route& route = routes.give[r];
      if (r == rank_) continue;
      show(slot + route.in_slot, array + route.in_array + route.begin(c), route.size(c));
    }
  };
  const auto take = [&](uint32_t c, uint32_t filled) {
    for (int r = 0; r < size_; ++r) {
      const Route &own_route = routes.give[r], &route = routes.take[r];
      if (r != rank_ && route.size(c) > 0) watch_.wait(segment_.block(r).filled, filled, r);
      from_[r] = r == rank_ ? array + own_route.in_array + own_route.begin(c)
                            : segment_.slot(r, filled - 1) + route.in_slot;
    }
    consume(c);
  };
  stream(routes.chunks, sent_bytes > 0, true, fill, take);
}

void Collectives::move_sections(const fl_signature& signature, const Sections& sections, const void* data,
                                void* output) {
  char* into = static_cast<char*>(output);
  if (choose(signature, sections.most_bytes()) == kDirectly) {
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
  end_reading(sections.bytes_of(rank_) > 0);
}

void Collectives::reduce_scatter(const fl_signature& signature, const void* data, void* output) {
  const size_t part = static_cast<size_t>(signature.count) / size_ * signature.itemsize;
  reduce_sections(signature, {size_, part}, data, output);
}

void Collectives::reduce_scatter_uneven(const fl_signature& signature, const fl_sections& sections_data, void* output) {
  reduce_sections(signature, {size_, 0, sections_data.bytes}, sections_data.data, output);
}

void Collectives::reduce_sections(const fl_signature& signature, const Sections& sections,
                                  const void* data, void* output) {
  const size_t item = signature.itemsize, part = sections.bytes(rank_, rank_) / item;
  const size_t bytes = sections.bytes_of(rank_), own_begin = sections.begin(rank_, rank_);
  receive_calls(signature);
  if (bytes <= kInlineBytes) {
    reduce_inline(signature, data, own_begin, part, output);
    return;
  }
  char* into = static_cast<char*>(output);
  if (choose(signature, bytes) == kDirectly) {
    reduce_read(signature, own_begin, static_cast<const char*>(data) + own_begin, part, into);
    end_reading(true);
  } else {
    const Routes routes = routes_of(sections);
    const Route& route = routes.give[rank_];
    stream_sections(routes, data, [&](uint32_t c) {
      fl::reduce(signature.dtype, signature.op, signature.scale, into + route.begin(c), from_.data(), size_,
                 route.size(c) / item);
    });
  }
  choice_.end(trial_);
}

void Collectives::all_to_all(const fl_signature& signature, const void* data, void* output) {
  const size_t section = static_cast<size_t>(signature.count) / size_ * signature.itemsize;
  exchange_sections(signature, {size_, section}, data, output);
}

void Collectives::all_to_all_uneven(const fl_signature& signature, const fl_sections& sections_data, void* output) {
  exchange_sections(signature, {size_, 0, sections_data.bytes}, sections_data.data, output);
}

void Collectives::exchange_sections(const fl_signature& signature, const Sections& sections,
                                    const void* data, void* output) {
  receive_calls(signature);
  if (sections.most_bytes() > kInlineBytes) return move_sections(signature, sections, data, output);
  char* into = static_cast<char*>(output);
  for (int r = 0; r < size_; ++r) {
    const size_t bytes = sections.bytes(r, rank_);
    if (bytes == 0) continue;
    const char* peer_data = r == rank_ ? static_cast<const char*>(data) : inline_data(r, sections.bytes_of(r));
    copy(into, peer_data + sections.begin(r, rank_), bytes);
    into += bytes;
  }
}

// The root's signature describes one part. Other ranks may not know dtype and shape.
Bytes Collectives::scatter(const fl_signature& signature, const void* data, void* output) {
  const int root = signature.root;
  const bool is_root = rank_ == root;
  receive_calls(signature);
  const fl_signature& root_call = description_of(root, calls_).signature;
  const size_t part = static_cast<size_t>(root_call.count) * root_call.itemsize;
  Bytes output_bytes;
  if (output == nullptr) {
    output_bytes = make_bytes(part);
    output = output_bytes.data.get();
  }
  if (part * size_ > kInlineBytes) {
    move_sections(signature, {size_, part, nullptr, root}, data, output);
  } else if (part > 0) {
    const char* array = is_root ? static_cast<const char*>(data) : inline_data(root, part * size_);
    copy(output, array + rank_ * part, part);
  }
  return output_bytes;
}

}  // namespace fl
