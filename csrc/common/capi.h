// Helpers of the C ABIs that convert an exception into an error result and a message.
#pragma once

#include "operation.h"

namespace fl {

// Inside an exception handler: store the message of the exception for fl_error().
void keep_error() noexcept;

// Inside an exception handler: return the handle of an operation that failed to start.
fl_op* failed_to_start() noexcept;

// Return the result of `run`, or `otherwise` if `run` throws.
template <typename Result, typename Run>
Result guarded(Result otherwise, Run run) noexcept {
  try {
    return run();
  } catch (...) {
    keep_error();
    return otherwise;
  }
}

// Return 0, or -1 if `run` throws.
template <typename Run>
int done(Run run) noexcept {
  return guarded(-1, [&] { return run(), 0; });
}

inline Handle as_handle(Handle handle) { return handle; }
inline Handle as_handle(std::shared_ptr<Operation> operation) { return handle_of(std::move(operation)); }

// Return a handle for the Handle or the Operation that `run` returns, or null if `run` returns null.
template <typename Run>
fl_op* handle(Run run) noexcept {
  try {
    return as_handle(run()).release();
  } catch (...) {
    return failed_to_start();
  }
}

// Like handle() for a `run` that returns `count` handles or operations.
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
