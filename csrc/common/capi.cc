// The shared part of the C ABI.
#include "capi.h"

#include <algorithm>

#include "../reduce/reduce.h"

namespace fl {

fl_op* failed_to_start() {
  auto failed = std::make_shared<Operation>();
  failed->shared = std::make_shared<Shared>();
  failed->status = FL_FAILED;
  try {
    throw;
  } catch (const std::exception& error) {
    failed->message = error.what();
  }
  return new Started(failed);
}

}  // namespace fl

extern "C" {

fl_status fl_op_wait(fl_op* op, double seconds) { return op->wait(seconds); }

double fl_op_ended(fl_op* op) { return op->ended_at(); }

void fl_op_stamp(fl_op* op, int64_t* ended, int64_t running) { op->stamp(ended, running); }

const char* fl_op_message(fl_op* op) { return op->outcome().message.c_str(); }

int fl_op_missing(fl_op* op, int* ranks, int capacity) {
  const auto& missing = op->outcome().missing;
  const int count = std::min(capacity, static_cast<int>(missing.size()));
  std::copy_n(missing.begin(), count, ranks);
  return count;
}

const fl_signature* fl_op_signatures(fl_op* op) { return op->outcome().seen.calls.data(); }

const char* fl_op_site(fl_op* op, int rank) {
  const auto& sites = op->outcome().seen.sites;
  return static_cast<size_t>(rank) < sites.size() ? sites[rank].text : "";
}

int fl_op_calls_ago(fl_op* op) { return static_cast<int>(op->outcome().seen.ago); }

double fl_op_age(fl_op* op, int rank) {
  const auto& ages = op->outcome().seen.ages;
  return static_cast<size_t>(rank) < ages.size() ? ages[rank] : -1;
}

void* fl_op_output(fl_op* op, size_t* bytes) {
  const fl::Bytes& output = op->outcome().output;
  *bytes = output.size;
  return output.data.get();
}

void fl_op_cancel(fl_op* op) { op->cancel(); }

void fl_claim_wait(int32_t* claim, double seconds) {
  fl::futex_wait(claim, 0, static_cast<int64_t>(seconds * 1e9), fl::kAllBits, fl::Among::kThreads);
}

void fl_op_free(fl_op* op) {
  if (op != nullptr) op->release();
}

int fl_reduce(int dtype, int op, double scale, void* into, const void* const* from, int ranks,
              size_t count) {
  return fl::reduce(dtype, op, scale, into, from, ranks, count);
}

}  // extern "C"
