// Helpers of the C ABIs: every exception becomes a status and a message.
#pragma once

#include <cstring>
#include <exception>
#include <memory>

#include "operation.h"

struct fl_op {
  std::shared_ptr<fl::Operation> operation;
};

namespace fl {

inline void copy_message(const char* text, char* message, size_t bytes) {
  if (bytes == 0) return;
  std::strncpy(message, text, bytes - 1);
  message[bytes - 1] = '\0';
}

// An operation that could not even be started is one that has failed.
template <typename Start>
fl_op* started(Start start) {
  try {
    return new fl_op{start()};
  } catch (const std::exception& error) {
    auto failed = std::make_shared<Operation>();
    failed->shared = std::make_shared<Shared>();
    failed->status = FL_FAILED;
    failed->message = error.what();
    return new fl_op{failed};
  }
}

}  // namespace fl
