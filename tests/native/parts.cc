// Random calls in which each rank has different data for every other rank.

#include <numeric>

#include "calls.h"
#include "reference.h"

namespace stress {
namespace {

Block section(const Block& of, size_t at, size_t bytes) {
  return block({of->begin() + at, of->begin() + at + bytes});
}

}  // namespace

// Ranks other than the root may use FL_ANY, and ranks without an output buffer receive an allocated one.
void Author::add_scatter() {
  const int dtype = some_dtype(FL_MIN), root = some_root();
  const size_t item = info_of(dtype).itemsize;
  const size_t part = some_count(static_cast<int>(item * world_.ranks));
  const Block whole = made(dtype, part * world_.ranks, false);
  std::vector<Step> call;
  for (int r = 0; r < world_.ranks; ++r) {
    call.push_back(step(signature(FL_SCATTER, dtype, 0, root, 1.0, part), r == root ? whole : nullptr));
    call[r].gathers = random_.one_in(3);
    call[r].output_bytes = call[r].gathers ? 0 : part * item;
    call[r].output_after = section(whole, r * part * item, part * item);
    if (r != root && call[r].gathers && random_.one_in(2)) forget(call[r].signature);
  }
  push(std::move(call));
}

void Author::add_all_to_all() {
  const int dtype = some_dtype(FL_MIN);
  const size_t item = info_of(dtype).itemsize, ranks = world_.ranks;
  const size_t bytes = some_count(static_cast<int>(item * ranks)) * item;
  add_exchange(FL_ALL_TO_ALL, dtype, std::vector<int64_t>(ranks * ranks, static_cast<int64_t>(bytes)));
}

// Some sections are empty, and one may be large.
void Author::add_uneven_all_to_all() {
  const int dtype = some_dtype(FL_MIN);
  const size_t item = info_of(dtype).itemsize, ranks = world_.ranks;
  std::vector<int64_t> bytes(ranks * ranks);
  const size_t most = some_count(static_cast<int>(item * ranks));
  for (int64_t& section : bytes) {
    section = random_.one_in(3) ? 0 : static_cast<int64_t>(random_.below(most + 1) * item);
  }
  if (random_.one_in(4)) {
    bytes[random_.below(ranks * ranks)] = static_cast<int64_t>(some_count(static_cast<int>(item)) * item);
  }
  add_exchange(FL_ALL_TO_ALL_UNEVEN, dtype, std::move(bytes));
}

// `bytes`: of each source for each destination.
void Author::add_exchange(int verb, int dtype, std::vector<int64_t> bytes) {
  const size_t item = info_of(dtype).itemsize, ranks = world_.ranks;
  const auto sections = std::make_shared<const std::vector<int64_t>>(std::move(bytes));
  std::vector<Block> given;
  std::vector<Step> call;
  for (size_t r = 0; r < ranks; ++r) {
    const auto row = sections->begin() + r * ranks;
    const size_t count = std::accumulate(row, row + ranks, size_t{0}) / item;
    given.push_back(made(dtype, count, false));
    call.push_back(step(signature(verb, dtype, 0, 0, 1.0, count), given[r]));
    if (verb == FL_ALL_TO_ALL_UNEVEN) call[r].sections = sections;
  }
  std::vector<size_t> at(ranks);
  for (size_t d = 0; d < ranks; ++d) {
    std::vector<char> wanted;
    for (size_t s = 0; s < ranks; ++s) {
      const auto begin = given[s]->begin() + at[s];
      at[s] += (*sections)[s * ranks + d];
      wanted.insert(wanted.end(), begin, given[s]->begin() + at[s]);
    }
    call[d].output_bytes = wanted.size();
    call[d].output_after = block(std::move(wanted));
  }
  push(std::move(call));
}

void Author::add_reduce_scatter() {
  const int op = some_op(), dtype = some_dtype(op);
  const size_t ranks = world_.ranks, part = some_count(static_cast<int>(info_of(dtype).itemsize * ranks));
  add_reduced_sections(signature(FL_REDUCE_SCATTER, dtype, op, 0, some_scale(dtype), part * ranks),
                       std::vector<size_t>(ranks, part));
}

// Some ranks receive nothing, and one may receive a large part.
void Author::add_uneven_reduce_scatter() {
  const int op = some_op(), dtype = some_dtype(op), tag = 1 + static_cast<int>(random_.below(9));
  const size_t item = info_of(dtype).itemsize, ranks = world_.ranks;
  const size_t most = some_count(static_cast<int>(item * ranks)), richest = random_.below(ranks);
  std::vector<size_t> counts(ranks);
  for (size_t& count : counts) count = random_.one_in(3) ? 0 : random_.below(most + 1);
  if (random_.one_in(4)) counts[richest] = some_count(static_cast<int>(item));
  const size_t all = std::accumulate(counts.begin(), counts.end(), size_t{0});
  add_reduced_sections(signature(FL_REDUCE_SCATTER_UNEVEN, dtype, op, tag, some_scale(dtype), all), counts);
}

// `counts`: elements that each rank receives.
void Author::add_reduced_sections(const fl_signature& s, const std::vector<size_t>& counts) {
  const size_t item = s.itemsize, ranks = world_.ranks;
  std::vector<int64_t> bytes;
  for (size_t i = 0; i < ranks * ranks; ++i) bytes.push_back(static_cast<int64_t>(counts[i % ranks] * item));
  const auto sections = std::make_shared<const std::vector<int64_t>>(std::move(bytes));
  const auto given = inputs(s.dtype, s.count, true);
  std::vector<Step> call;
  size_t begin = 0;
  for (size_t r = 0; r < ranks; ++r) {
    std::vector<char> wanted(counts[r] * item);
    std::vector<const void*> from;
    for (const Block& one : given) from.push_back(one->data() + begin);
    reference(s.dtype, s.op, s.scale, wanted.data(), from, counts[r]);
    begin += wanted.size();
    call.push_back(step(s, given[r]));
    if (s.verb == FL_REDUCE_SCATTER_UNEVEN) call[r].sections = sections;
    call[r].output_bytes = wanted.size();
    call[r].output_after = block(std::move(wanted));
  }
  push(std::move(call));
}

}  // namespace stress
