// Functions of the C ABI that the shared-memory and the Gloo library have in common.
#include "capi.h"

#include <algorithm>
#include <cstdio>
#include <new>

#include "../reduce/reduce.h"

namespace fl {

namespace {

constexpr const char* kNoMemory = "out of memory";
thread_local char last_error[1024];

// Handle that is returned if an operation cannot start and there is no memory for a new handle.
struct OutOfMemory final : Started {
  using Started::Started;
  void release() noexcept override {}
} out_of_memory{ended_with(FL_FAILED, {kNoMemory, {}, {}, {}})};

}  // namespace

void keep_error() noexcept {
  const auto keep = [](const char* what) { std::snprintf(last_error, sizeof last_error, "%s", what); };
  try {
    throw;
  } catch (const std::bad_alloc&) {
    keep(kNoMemory);
  } catch (const std::exception& error) {
    keep(error.what());
  } catch (...) {
    keep("an exception of an unknown type");
  }
}

fl_op* failed_to_start() noexcept {
  keep_error();
  try {
    return new Started(ended_with(FL_FAILED, {last_error, {}, {}, {}}));
  } catch (const std::bad_alloc&) {
    return &out_of_memory;
  }
}

}  // namespace fl

extern "C" {

const char* fl_error(void) { return fl::last_error; }

// Return FL_PENDING, as after a timeout, if this thread has too little memory to run the operation.
fl_status fl_op_wait(fl_op* op, double seconds) {
  return fl::guarded(FL_PENDING, [&] { return op->wait(seconds); });
}

double fl_op_ended(fl_op* op) { return op->ended_at(); }

void fl_op_stamp(fl_op* op, int64_t* ended, int64_t running) { op->stamp(ended, running); }

const char* fl_op_message(fl_op* op) { return op->outcome().message.c_str(); }

int fl_op_missing(fl_op* op, int* ranks, int capacity) {
  const auto& missing = op->outcome().missing;
  const int count = std::min(capacity, static_cast<int>(missing.size()));
  std::copy_n(missing.begin(), count, ranks);
  return count;
}

const fl_signature* fl_op_signatures(fl_op* op) { return op->outcome().report.calls.data(); }

const char* fl_op_site(fl_op* op, int rank) {
  const auto& sites = op->outcome().report.sites;
  return static_cast<size_t>(rank) < sites.size() ? sites[rank].text : "";
}

int fl_op_calls_ago(fl_op* op) { return static_cast<int>(op->outcome().report.ago); }

double fl_op_age(fl_op* op, int rank) {
  const auto& ages = op->outcome().report.ages;
  return static_cast<size_t>(rank) < ages.size() ? ages[rank] : -1;
}

void* fl_op_output(fl_op* op, size_t* bytes) {
  const fl::Bytes& output = op->outcome().output;
  *bytes = output.size;
  return output.data.get();
}

int fl_op_cancel(fl_op* op) { return fl::done([&] { op->cancel(); }); }

void fl_claim_wait(int32_t* claim, double seconds) {
  fl::futex_wait(claim, 0, static_cast<int64_t>(seconds * 1e9), fl::kAllBits, fl::FutexScope::kThreads);
}

void fl_op_free(fl_op* op) { if (op != nullptr) op->release(); }

int fl_reduce(int dtype, int op, double scale, void* into, const void* const* from, int ranks, size_t count) {
  return fl::reduce(dtype, op, scale, into, from, ranks, count);
}

}  // extern "C"
