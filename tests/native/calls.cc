#include "calls.h"

#include <cstring>

#include "../../csrc/common/copying.h"
#include "reference.h"

namespace stress {
namespace {

// Random numbers are generated once, because that takes longer than reducing them.
const std::vector<char>& pool(int dtype, bool numbers) {
  constexpr size_t kCount = 65521;
  static std::vector<char> pools[kDTypes][2];
  std::vector<char>& found = pools[dtype][numbers ? 1 : 0];
  if (found.empty()) {
    Random random(dtype);
    found.resize(kCount * info_of(dtype).itemsize);
    (numbers ? fill : fill_bits)(dtype, random, found.data(), kCount);
  }
  return found;
}

}  // namespace

Block block(std::vector<char> bytes) {
  return std::make_shared<const std::vector<char>>(std::move(bytes));
}

Author::Author(const Shape& world, Random random, size_t largest_bytes)
    : world_(world),
      random_(random),
      largest_(largest_bytes),
      script_(world.ranks),
      added_(world.strides.size()),
      dropped_(world.strides.size()) {}

Script Author::write(int calls) {
  for (int i = 0; i < calls; ++i) add_call();
  return std::move(script_);
}

void Author::add_call() {
  switch (random_.below(27)) {
    case 0: case 1: case 2: case 3: case 4: return add_reduction(FL_ALL_REDUCE);
    case 5: return add_reduction(FL_REDUCE);
    case 6: return add_reduce_scatter();
    case 7: return add_broadcast();
    case 8: return add_gather(FL_ALL_GATHER);
    case 9: return add_gather(FL_GATHER);
    case 10: return add_scatter();
    case 11: return add_all_to_all();
    case 12: return add_barrier();
    case 13: return add_message();
    case 14: return add_ring();
    case 15: case 16: return random_.one_in(8) ? add_root_that_knows_nothing() : add_mismatch();
    case 17: return add_message_mismatch();
    case 18: return add_uneven_all_to_all();
    case 19: case 20: case 21: return add_letters();
    case 22: return add_uneven_reduce_scatter();
    case 23: return add_open_receives();
    case 24: return add_scan(random_.one_in(2) ? FL_SCAN : FL_EXSCAN);
    default: return add_or_drop_region();
  }
}

size_t Author::some_bytes() {
  const size_t chunk = world_.chunk_bytes, ranks = world_.ranks;
  constexpr size_t kTinyBytes = 16;  // bytes that travel in the line of a call
  const size_t small[] = {0, 1, kTinyBytes, fl::kStreamBytes, world_.inline_bytes,
                          fl::kStreamBytes * ranks, world_.inline_bytes / ranks, 64 * ranks};
  const size_t large[] = {chunk, chunk / ranks, world_.piece_bytes, chunk + world_.inline_bytes};
  if (random_.one_in(4)) return random_.below(2 * world_.inline_bytes);
  if (!random_.one_in(3)) return small[random_.below(sizeof small / sizeof *small)];
  const size_t bytes = large[random_.below(4)] * (1 + random_.below(9));
  return std::min(bytes, largest_);
}

size_t Author::some_count(int itemsize) {
  const size_t count = some_bytes() / itemsize + random_.below(4);
  return count < 2 ? 0 : count - 2;
}

int Author::some_op() {
  const int ops[] = {FL_SUM, FL_PROD, FL_MIN, FL_MAX, FL_AND, FL_OR, FL_XOR};
  return ops[random_.below(7)];
}

int Author::some_dtype(int op) {
  if (op < FL_AND && random_.one_in(3)) return FL_FLOAT32;
  for (;;) {
    const int dtype = static_cast<int>(random_.below(kDTypes));
    if (goes_together(dtype, op)) return dtype;
  }
}

double Author::some_scale(int dtype) {
  const double scales[] = {1.0, 1.0, 1.0 / world_.ranks, -0.25};
  return is_integer(dtype) ? 1.0 + static_cast<double>(random_.below(2)) : scales[random_.below(4)];
}

fl_signature Author::signature(int verb, int dtype, int op, int root, double scale, size_t count) {
  fl_signature s = signature_of(verb, dtype, info_of(dtype).itemsize, count, root);
  s.op = op;
  s.scale = scale;
  return s;
}

Step Author::step(const fl_signature& signature, Block data) {
  Step step;
  step.signature = signature;
  step.data = std::move(data);
  step.offset = random_.below(4) * signature.itemsize;
  if (random_.one_in(4)) {
    step.how = How::kStart;
    step.wait = random_.one_in(2);
  } else if (signature.verb != FL_SEND && signature.verb != FL_RECV && random_.one_in(2)) {
    step.how = How::kInTwoSteps;
  }
  return step;
}

Block Author::made(int dtype, size_t count, bool numbers) {
  const std::vector<char>& from = pool(dtype, numbers);
  const size_t item = info_of(dtype).itemsize;
  std::vector<char> bytes(count * item);
  size_t at = random_.below(from.size() / item) * item;
  for (size_t done = 0; done < bytes.size(); at = 0) {
    const size_t n = std::min(bytes.size() - done, from.size() - at);
    std::memcpy(bytes.data() + done, from.data() + at, n);
    done += n;
  }
  return block(std::move(bytes));
}

std::vector<Block> Author::inputs(int dtype, size_t count, bool numbers) {
  std::vector<Block> all;
  for (int r = 0; r < world_.ranks; ++r) all.push_back(made(dtype, count, numbers));
  return all;
}

void Author::push(std::vector<Step> call) {
  for (Step& step : call) step.may_run_ahead = random_.one_in(2);
  for (int r = 0; r < world_.ranks; ++r) script_.steps[r].push_back(std::move(call[r]));
}

// Put the data into regions: of all ranks at one offset, of some ranks at others, or of no rank.
void Author::place(std::vector<Step>& call, size_t bytes) {
  std::vector<int> usable;
  for (size_t i = 0; i < added_.size(); ++i) {
    if (added_[i] && bytes + 4096 <= world_.strides[i]) usable.push_back(static_cast<int>(i));
  }
  if (usable.empty() || random_.one_in(4)) return;
  const bool together = !random_.one_in(4);
  const int region = usable[random_.below(usable.size())];
  const size_t offset = call[0].signature.itemsize * random_.below(100);
  for (Step& step : call) {
    if (!together && random_.one_in(3)) continue;
    step.region = together ? region : usable[random_.below(usable.size())];
    step.offset = together ? offset : step.offset;
  }
}

void Author::add_reduction(int verb) {
  const int op = some_op(), dtype = some_dtype(op), root = some_root();
  const size_t count = some_count(info_of(dtype).itemsize);
  const double scale = some_scale(dtype);
  const auto given = inputs(dtype, count, true);
  std::vector<char> wanted(count * info_of(dtype).itemsize);
  std::vector<const void*> from;
  for (const Block& one : given) from.push_back(one->data());
  reference(dtype, op, scale, wanted.data(), from, count);
  const Block result = block(std::move(wanted));
  std::vector<Step> call;
  for (int r = 0; r < world_.ranks; ++r) {
    call.push_back(step(signature(verb, dtype, op, verb == FL_REDUCE ? root : 0, scale, count), given[r]));
    if (verb == FL_ALL_REDUCE || r == root) call[r].data_after = result;
  }
  place(call, result->size());
  push(std::move(call));
}

void Author::add_scan(int verb) {
  const int op = some_op(), dtype = some_dtype(op);
  const size_t count = some_count(info_of(dtype).itemsize);
  const double scale = some_scale(dtype);
  const auto given = inputs(dtype, count, true);
  std::vector<const void*> before;
  std::vector<Step> call;
  for (int r = 0; r < world_.ranks; ++r) {
    call.push_back(step(signature(verb, dtype, op, 0, scale, count), given[r]));
    if (verb == FL_SCAN) before.push_back(given[r]->data());
    std::vector<char> wanted(*given[r]);
    if (!before.empty()) reference(dtype, op, scale, wanted.data(), before, count);
    call[r].data_after = block(std::move(wanted));
    if (verb == FL_EXSCAN) before.push_back(given[r]->data());
  }
  push(std::move(call));
}

void Author::add_broadcast() {
  const int dtype = some_dtype(FL_MIN), root = some_root();
  const auto given = inputs(dtype, some_count(info_of(dtype).itemsize), false);
  const size_t count = given[0]->size() / info_of(dtype).itemsize;
  std::vector<Step> call;
  for (int r = 0; r < world_.ranks; ++r) {
    call.push_back(step(signature(FL_BROADCAST, dtype, 0, root, 1.0, count), given[r]));
    call[r].data_after = given[root];
  }
  push(std::move(call));
}

// Each rank sends an arbitrary number of elements.
void Author::add_gather(int verb) {
  const int dtype = some_dtype(FL_MIN), root = verb == FL_GATHER ? some_root() : 0;
  const size_t item = info_of(dtype).itemsize, together = some_count(static_cast<int>(item));
  const bool equal = random_.one_in(3);
  std::vector<Step> call;
  std::vector<char> wanted;
  for (int r = 0; r < world_.ranks; ++r) {
    const size_t count = equal ? together : some_count(static_cast<int>(item));
    const Block given = made(dtype, count, false);
    wanted.insert(wanted.end(), given->begin(), given->end());
    call.push_back(step(signature(verb, dtype, 0, root, 1.0, count), given));
  }
  const Block all = block(std::move(wanted));
  for (int r = 0; r < world_.ranks; ++r) {
    if (verb == FL_GATHER && r != root) continue;
    call[r].output_after = all;
    call[r].gathers = true;
    call[r].room = static_cast<Room>(random_.below(3));
  }
  push(std::move(call));
}

void Author::add_barrier() {
  fl_signature barrier = signature(FL_BARRIER, 0, 0, 0, 1.0, 0);
  barrier.ndim = barrier.itemsize = 0;
  std::vector<Step> call;
  for (int r = 0; r < world_.ranks; ++r) call.push_back(step(barrier, nullptr));
  push(std::move(call));
}

void Author::add_or_drop_region() {
  for (size_t i = 0; i < added_.size(); ++i) {
    if (dropped_[i] || (added_[i] && !random_.one_in(6))) continue;
    std::vector<Step> call(world_.ranks);
    for (Step& one : call) (added_[i] ? one.drops : one.adds) = static_cast<int>(i);
    dropped_[i] = added_[i];
    added_[i] = !added_[i];
    return push(std::move(call));
  }
}

}  // namespace stress
