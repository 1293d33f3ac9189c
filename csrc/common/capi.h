// Helpers of the C ABIs: an exception becomes the result that stands for a failure, and a message.
#pragma once

#include "operation.h"

namespace fl {

// Inside a handler: keep what was thrown for fl_error().
void keep_error() noexcept;

// Inside a handler: the handle of an operation that could not be started.
fl_op* failed_to_start() noexcept;

// The result of `run`, or `otherwise` where it throws.
template <typename Result, typename Run>
Result guarded(Result otherwise, Run run) noexcept {
  try {
    return run();
  } catch (...) {
    keep_error();
    return otherwise;
  }
}

// 0, or -1 where `run` throws.
template <typename Run>
int done(Run run) noexcept {
  return guarded(-1, [&] { return run(), 0; });
}

inline Handle as_handle(Handle handle) { return handle; }
inline Handle as_handle(std::shared_ptr<Operation> operation) { return handle_of(std::move(operation)); }

// What `run` returns, a Handle or an operation; null where there is nothing to fetch.
template <typename Run>
fl_op* handle(Run run) noexcept {
  try {
    return as_handle(run()).release();
  } catch (...) {
    return failed_to_start();
  }
}

// The same of several.
template <typename Run>
void handles(fl_op** results, int count, Run run) noexcept {
  try {
    auto ended = run();
    for (int i = 0; i < count; ++i) results[i] = as_handle(std::move(ended[i])).release();
  } catch (...) {
    for (int i = 0; i < count; ++i) results[i] = failed_to_start();
  }
}

}  // namespace fl
