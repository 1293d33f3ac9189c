// Why an operation ended, and which ranks it is about.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "abi.h"

namespace fl {

struct Failure : std::runtime_error {
  Failure(fl_status status, std::vector<int> missing, const std::string& message)
      : std::runtime_error(message), status(status), missing(std::move(missing)) {}
  fl_status status;
  std::vector<int> missing;
};

// The ranks called different things; each rank's signature says what. The group lives on.
struct Mismatch : std::exception {
  const char* what() const noexcept override { return "the ranks called different things"; }
};

}  // namespace fl
