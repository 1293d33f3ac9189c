// The shared part of the C ABI.
#include "capi.h"

#include <algorithm>

#include "../reduce/reduce.h"

extern "C" {

fl_status fl_op_wait(fl_op* op, double seconds) {
  fl::Operation& operation = *op->operation;
  fl::Shared& shared = *operation.shared;
  const auto ended = [&] { return operation.status != FL_PENDING; };
  std::unique_lock<std::mutex> lock(shared.mutex);
  if (operation.helper != nullptr && !ended()) {
    lock.unlock();
    operation.helper->help(operation, seconds > 0);
    lock.lock();
  }
  // A wait of no time at all would take 60 us: the kernel wakes sleepers late.
  const std::chrono::duration<double> time(seconds);
  if (seconds > 0) fl::await(operation);
  if (seconds > 0 ? shared.done.wait_for(lock, time, ended) : ended()) return operation.status;
  if (shared.transport != nullptr) shared.transport->enforce_deadline();
  return FL_PENDING;
}

double fl_op_ended(fl_op* op) {
  const fl::Operation& operation = *op->operation;
  const std::lock_guard<std::mutex> lock(operation.shared->mutex);
  return std::chrono::duration<double>(operation.ended.time_since_epoch()).count();
}

void fl_op_stamp(fl_op* op, int64_t* ended, int64_t running) {
  fl::Operation& operation = *op->operation;
  const std::lock_guard<std::mutex> lock(operation.shared->mutex);
  operation.stamp = {ended, running};
  if (operation.status != FL_PENDING) operation.stamp.write();
}

const char* fl_op_message(fl_op* op) { return op->operation->message.c_str(); }

int fl_op_missing(fl_op* op, int* ranks, int capacity) {
  const auto& missing = op->operation->missing;
  const int count = std::min(capacity, static_cast<int>(missing.size()));
  std::copy_n(missing.begin(), count, ranks);
  return count;
}

const fl_signature* fl_op_signatures(fl_op* op) { return op->operation->seen.calls.data(); }

const char* fl_op_site(fl_op* op, int rank) {
  const auto& sites = op->operation->seen.sites;
  return static_cast<size_t>(rank) < sites.size() ? sites[rank].text : "";
}

int fl_op_calls_ago(fl_op* op) { return static_cast<int>(op->operation->seen.ago); }

double fl_op_age(fl_op* op, int rank) {
  const auto& ages = op->operation->seen.ages;
  return static_cast<size_t>(rank) < ages.size() ? ages[rank] : -1;
}

void* fl_op_output(fl_op* op, size_t* bytes) {
  *bytes = op->operation->output.size;
  return op->operation->output.data.get();
}

void fl_op_free(fl_op* op) { delete op; }

int fl_reduce(int dtype, int op, double scale, void* into, const void* const* from, int ranks,
              size_t count) {
  return fl::reduce(dtype, op, scale, into, from, ranks, count);
}

}  // extern "C"
