// One collective of random kind and size, by all ranks, and whether it gave what it promises.
#include <algorithm>
#include <array>
#include <memory>

#include "plays.h"

namespace stress {
namespace {

// Elements: nothing, small, around what travels in a header, around a piece, several pieces.
constexpr std::array<size_t, 12> kCounts{0,     1,      7,      1000,   16383,  16384,
                                         16385, 131071, 131073, 300007, 524288, 1200001};

struct Collective {
  int verb, root;
  size_t count;
  bool async, room;  // room: the caller makes the output where it has the choice
  uint64_t step;
};

uint32_t sum(uint64_t step, int ranks, size_t i) {
  uint32_t total = 0;
  for (int r = 0; r < ranks; ++r) total += value(step, r, i);
  return total;
}

void check_reduced(const Collective& c, int ranks, const uint32_t* got, size_t first, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    check(got[i] == sum(c.step, ranks, first + i), "a wrong sum");
  }
}

void check_copied(const Collective& c, int from, const uint32_t* got, size_t first, size_t n) {
  for (size_t i = 0; i < n; ++i) check(got[i] == value(c.step, from, first + i), "a wrong copy");
}

void in_place(Rank& rank, const Collective& c) {
  Array data = values(c.step, rank.rank, c.count);
  check_ok(rank.run(signature_of(c.verb, c.count, c.root), data.data(), nullptr, -1, c.async), "in place");
  if (c.verb == FL_BROADCAST) return check_copied(c, c.root, data.data(), 0, c.count);
  if (c.verb == FL_SCAN || c.verb == FL_EXSCAN) {
    const int terms = rank.rank + (c.verb == FL_SCAN ? 1 : 0);
    return terms > 0 ? check_reduced(c, terms, data.data(), 0, c.count)
                     : check_copied(c, rank.rank, data.data(), 0, c.count);
  }
  const bool reduced = c.verb == FL_ALL_REDUCE || rank.rank == c.root;
  if (reduced) return check_reduced(c, rank.size, data.data(), 0, c.count);
  check_copied(c, rank.rank, data.data(), 0, c.count);
}

void in_sections(Rank& rank, const Collective& c) {
  const size_t section = c.count / rank.size;
  Array data = values(c.step, rank.rank, section * rank.size);
  Array got(c.verb == FL_REDUCE_SCATTER ? section : data.size());
  check_ok(rank.run(signature_of(c.verb, data.size(), 0), data.data(), got.data(), -1, c.async), "in sections");
  const size_t first = section * rank.rank;
  if (c.verb == FL_REDUCE_SCATTER) {
    return check_reduced(c, rank.size, got.data(), first, section);
  }
  for (int r = 0; r < rank.size; ++r) {
    check_copied(c, r, got.data() + r * section, first, section);
  }
}

// Rank r has for rank q a number of elements that anybody can tell.
void uneven(Rank& rank, const Collective& c) {
  const int n = rank.size;
  const auto elements = [&](int from, int to) {
    return value(c.step, from, to + 1000) % (c.count / n + 1);
  };
  std::vector<int64_t> bytes(n * n);
  size_t given = 0, taken = 0;
  for (int i = 0; i < n * n; ++i) bytes[i] = 4 * static_cast<int64_t>(elements(i / n, i % n));
  for (int r = 0; r < n; ++r) given += elements(rank.rank, r), taken += elements(r, rank.rank);
  const Array data = values(c.step, rank.rank, given);
  Array got(taken);
  fl_sections sections{data.data(), bytes.data()};
  check_ok(rank.run(signature_of(c.verb, given, 0), &sections, got.data(), -1, c.async), "uneven");
  size_t at = 0;
  for (int from = 0; from < n; ++from) {
    size_t first = 0;
    for (int to = 0; to < rank.rank; ++to) first += elements(from, to);
    check_copied(c, from, got.data() + at, first, elements(from, rank.rank));
    at += elements(from, rank.rank);
  }
}

// Parts of which some are small, and some perhaps empty.
void reduced_unevenly(Rank& rank, const Collective& c) {
  const int n = rank.size;
  const auto elements = [&](int to) { return value(c.step, 0, to + 2000) % (c.count / n + 1); };
  std::vector<int64_t> bytes(n * n);
  size_t given = 0, first = 0;
  for (int i = 0; i < n * n; ++i) bytes[i] = 4 * static_cast<int64_t>(elements(i % n));
  for (int r = 0; r < n; ++r) given += elements(r), first += r < rank.rank ? elements(r) : 0;
  const Array data = values(c.step, rank.rank, given);
  Array got(elements(rank.rank));
  fl_sections sections{data.data(), bytes.data()};
  check_ok(rank.run(signature_of(c.verb, given, 5), &sections, got.data(), -1, c.async), "reduced unevenly");
  check_reduced(c, n, got.data(), first, got.size());
}

void gathers(Rank& rank, const Collective& c) {
  const auto count = [&](int r) { return value(c.step, r, 999) % (c.count + 1); };
  const bool wanted = c.verb == FL_ALL_GATHER || c.root == rank.rank;
  size_t total = 0;
  for (int r = 0; wanted && r < rank.size; ++r) total += count(r);
  Array data = values(c.step, rank.rank, count(rank.rank)), got(total);
  fl_room room{got.data(), total * 4};
  const fl_signature mine = signature_of(c.verb, data.size(), c.root);
  fl_op* op = rank.run(mine, data.data(), c.room && wanted ? &room : nullptr, -1, c.async);
  const uint32_t* from = got.data();
  if (op != nullptr && !(c.room && wanted)) {
    while (fl_op_wait(op, 0.1) == FL_PENDING) {
    }
    size_t bytes = 0;
    from = static_cast<uint32_t*>(fl_op_output(op, &bytes));
    check(from != nullptr && bytes == total * 4, "a gather of a wrong size");
  } else {
    check_ok(op, "gather");
    op = nullptr;
  }
  for (int r = 0; wanted && r < rank.size; from += count(r++)) {
    check_copied(c, r, from, 0, count(r));
  }
  check_ok(op, "gather");
}

void scatters(Rank& rank, const Collective& c) {
  const bool gives = rank.rank == c.root;
  Array data = values(c.step, rank.rank, gives ? c.count * rank.size : 0), got(c.count);
  fl_signature mine = signature_of(c.verb, c.count, c.root);
  if (!gives && !c.room) mine = {0, FL_SCATTER, 0, FL_SUM, c.root, 1, 0, 0, FL_ANY, {}, 0};
  const bool into = gives || c.room;
  fl_op* op = rank.run(mine, gives ? data.data() : nullptr, into ? got.data() : nullptr, -1, c.async);
  const size_t first = c.count * rank.rank;
  if (into) {
    check_ok(op, "scatter");
    return check_copied(c, c.root, got.data(), first, c.count);
  }
  while (fl_op_wait(op, 0.1) == FL_PENDING) {
  }
  size_t bytes = 0;
  const auto* part = static_cast<uint32_t*>(fl_op_output(op, &bytes));
  check(part != nullptr && bytes == c.count * 4, "a part of a wrong size");
  check(fl_op_signatures(op)[c.root].count == static_cast<int64_t>(c.count), "a wrong signature");
  check_copied(c, c.root, part, first, c.count);
  check_ok(op, "scatter");
}

}  // namespace

void play_collective(Rank& rank, Random& random, uint64_t step) {
  Collective c{};
  c.verb = static_cast<int>(1 + random.below(FL_VERBS - 1));
  c.root = static_cast<int>(random.below(rank.size));
  c.count = kCounts[random.below(kCounts.size())];
  c.room = random.one_in(2);
  c.step = step;
  c.async = Random(step * 64 + rank.rank).one_in(2);  // each rank as it likes
  switch (c.verb) {
    case FL_SEND:
    case FL_RECV:
    case FL_BARRIER: return check_ok(rank.run(signature_of(FL_BARRIER, 0, 0), nullptr, nullptr, -1,
                                              c.async), "barrier");
    case FL_REDUCE_SCATTER:
    case FL_ALL_TO_ALL: return in_sections(rank, c);
    case FL_ALL_TO_ALL_UNEVEN: return uneven(rank, c);
    case FL_REDUCE_SCATTER_UNEVEN: return reduced_unevenly(rank, c);
    case FL_ALL_GATHER:
    case FL_GATHER: return gathers(rank, c);
    case FL_SCATTER: return scatters(rank, c);
    default: return in_place(rank, c);
  }
}

}  // namespace stress
