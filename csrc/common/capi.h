// Helpers of the C ABIs: every exception becomes a status and a message.
#pragma once

#include <cstring>
#include <exception>
#include <memory>
#include <utility>

#include "operation.h"

namespace fl {

inline void copy_message(const char* text, char* message, size_t bytes) {
  if (bytes == 0) return;
  std::strncpy(message, text, bytes - 1);
  message[bytes - 1] = '\0';
}

// Inside a handler: the handle of an operation that could not be started.
fl_op* failed_to_start();

inline Handle as_handle(Handle handle) { return handle; }
inline Handle as_handle(std::shared_ptr<Operation> operation) { return handle_of(std::move(operation)); }

// What `run` returns, a Handle or an operation; null where there is nothing to fetch.
template <typename Run>
fl_op* handle(Run run) {
  try {
    return as_handle(run()).release();
  } catch (const std::exception&) {
    return failed_to_start();
  }
}

// The same of several.
template <typename Run>
void handles(fl_op** results, int count, Run run) {
  try {
    auto ended = run();
    for (int i = 0; i < count; ++i) results[i] = as_handle(std::move(ended[i])).release();
  } catch (const std::exception&) {
    for (int i = 0; i < count; ++i) results[i] = failed_to_start();
  }
}

}  // namespace fl
