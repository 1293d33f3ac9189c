// Calls that do not match.

#include "calls.h"
#include "reference.h"

namespace stress {

Step Author::mismatched(const fl_signature& s) {
  const size_t parts = s.verb == FL_SCATTER ? world_.ranks : 1;
  const bool has_data = s.verb != FL_BARRIER;
  Step wrong = step(s, has_data ? made(s.dtype, s.count * parts, false) : nullptr);
  wrong.status = FL_MISMATCH;
  const bool has_output = s.verb == FL_REDUCE_SCATTER || s.verb == FL_SCATTER || s.verb == FL_ALL_TO_ALL;
  wrong.output_bytes = has_output ? s.count * s.itemsize : 0;
  return wrong;
}

// A signature that differs in one field.
fl_signature Author::other_than(const fl_signature& base) {
  const auto count = static_cast<size_t>(base.count);
  fl_signature other = base;
  switch (random_.below(7)) {
    case 0: other.verb = base.verb == FL_BARRIER ? FL_REDUCE : FL_BARRIER; break;
    case 1: other = signature(base.verb, base.dtype == 1 ? 2 : 1, 2, 0, 1.0, count); break;
    case 2: other.op = 3; break;
    case 3: other.root = world_.ranks - 1; break;
    case 4: other.scale = 0.5; break;
    case 5: other.part_of = 1 + static_cast<int>(random_.below(31)); break;
    default: other = signature(FL_ALL_REDUCE, base.dtype, 2, 0, 1.0, count + world_.ranks);
  }
  return other;
}

// In a scatter: ranks with FL_ANY raise the mismatch as well.
void Author::forget_some(std::vector<Step>& call, int odd_one) {
  const int ranks = world_.ranks, knows = (odd_one + 1) % ranks;
  for (int r = 0; r < ranks; ++r) {
    if (r == odd_one || r == knows || !random_.one_in(2)) continue;
    forget(call[r].signature);
    call[r].data = nullptr;
    call[r].gathers = true;
    call[r].output_bytes = 0;
  }
}

void Author::add_mismatch() {
  if (world_.ranks == 1) return;
  const int verbs[] = {FL_ALL_REDUCE, FL_REDUCE_SCATTER, FL_BROADCAST, FL_ALL_GATHER, FL_BARRIER,
                       FL_REDUCE,     FL_GATHER,         FL_SCATTER,   FL_ALL_TO_ALL};
  const int dtype = some_dtype(FL_MIN), ranks = world_.ranks;
  const size_t count = some_count(info_of(dtype).itemsize) / ranks * ranks;
  const fl_signature base = signature(verbs[random_.below(9)], dtype, 2, 0, 1.0, count);
  const fl_signature other = other_than(base);
  const int odd_one = some_root();
  std::vector<Step> call;
  for (int r = 0; r < ranks; ++r) call.push_back(mismatched(r == odd_one ? other : base));
  if (base.verb == FL_SCATTER) forget_some(call, odd_one);
  size_t most = 0;
  for (const Step& one : call) most = std::max(most, one.data == nullptr ? 0 : one.data->size());
  if (random_.one_in(2)) place(call, most);
  for (Step& one : call) {
    if (one.data == nullptr) one.region = -1;
  }
  push_mismatch(std::move(call));
}

// All calls agree, but the root of a scatter does not know its data.
void Author::add_root_that_knows_nothing() {
  if (world_.ranks == 1) return;
  const int root = some_root();
  const fl_signature base = signature(FL_SCATTER, 1, 0, root, 1.0, 10);
  std::vector<Step> call;
  for (int r = 0; r < world_.ranks; ++r) {
    call.push_back(mismatched(base));
    if (r == root || random_.one_in(2)) forget(call[r].signature);
  }
  push_mismatch(std::move(call));
}

// Later matching calls may raise the mismatch instead of returning, at least once on each rank, because ranks
// may have run ahead. In the last call all ranks need each other.
void Author::push_mismatch(std::vector<Step> call) {
  std::vector<fl_signature> seen;
  for (const Step& one : call) {
    seen.push_back(one.signature);
    seen.back().sequence = 1;
  }
  std::vector<size_t> begin;  // only some ranks have messages
  for (const auto& steps : script_.steps) begin.push_back(steps.size());
  push(std::move(call));
  for (size_t i = random_.below(10); i > 2; --i) {
    random_.one_in(3) ? add_gather(FL_GATHER) : random_.one_in(2) ? add_scan(FL_SCAN) : add_broadcast();
  }
  add_reduction(FL_ALL_REDUCE);
  for (size_t r = 0; r < begin.size(); ++r) {
    auto& steps = script_.steps[r];
    steps[begin[r]].differs = true;
    steps.back().tells = true;
    for (size_t i = begin[r]; i < steps.size(); ++i) {
      steps[i].seen = seen;
      steps[i].may_differ = true;
    }
  }
}

}  // namespace stress
