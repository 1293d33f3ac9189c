// What ranks call in the model, and what must come of it.
#include <cstring>
#include <memory>
#include <vector>

#include "../../../csrc/common/capi.h"
#include "../../../csrc/shm/group.h"
#include "model.h"

namespace {

using model::check;

struct Outcome {
  fl_status status = FL_OK;
  std::vector<int> missing;
};

Outcome outcome_of(const fl::Handle& handle) {
  if (handle == nullptr) return {};
  fl_status status;
  while ((status = handle->wait(1.0)) == FL_PENDING) {
  }
  return {status, handle->outcome().missing};
}

constexpr double kForever = 100;

std::unique_ptr<fl::ShmGroup> join(int rank, int ranks) {
  const size_t bytes = fl::Segment::bytes_for(ranks);
  fl::Mapping mapping = rank == 0 ? fl::Mapping::create("/model/0", bytes) : fl::Mapping::open("/model/0", bytes);
  return std::make_unique<fl::ShmGroup>(std::move(mapping), rank, ranks);
}

fl_signature signature(int verb, size_t count) {
  fl_signature s{};
  s.verb = verb;
  s.dtype = 3;
  s.scale = 1;
  s.count = s.shape[0] = static_cast<int64_t>(count);
  s.itemsize = 4;
  s.ndim = 1;
  return s;
}

void barriers(int rank) {
  auto* group = join(rank, 2).release();
  model::begin();
  fl_signature s = signature(FL_BARRIER, 0);
  for (int i = 0; i < 2; ++i) {
    const Outcome outcome = outcome_of(group->run(s, nullptr, nullptr, -1, kForever));
    check(outcome.status == FL_OK, "a barrier ends with status " + std::to_string(outcome.status));
  }
}
const model::Registered barrier2{{"barrier/2x2", 2, nullptr, barriers}};

template <size_t count>
void sums(int rank) {
  auto* group = join(rank, 2).release();
  model::begin();
  fl_signature s = signature(FL_ALL_REDUCE, count);
  auto* data = new int32_t[count];
  for (int i = 0; i < 2; ++i) {
    for (size_t k = 0; k < count; ++k) data[k] = static_cast<int32_t>(k + rank + i);
    const Outcome outcome = outcome_of(group->run(s, data, nullptr, -1, kForever));
    check(outcome.status == FL_OK, "all_reduce ends with status " + std::to_string(outcome.status));
    for (size_t k = 0; k < count; ++k) {
      check(data[k] == static_cast<int32_t>(2 * k + 1 + 2 * i), "all_reduce: wrong sum");
    }
  }
}
const model::Registered tiny{{"all_reduce_tiny/2x2", 2, nullptr, sums<4>}};
const model::Registered inline_{{"all_reduce_inline/2x2", 2, nullptr, sums<16>}};
const model::Registered large{{"all_reduce_large/2x2", 2, nullptr, sums<300>}};

}  // namespace
