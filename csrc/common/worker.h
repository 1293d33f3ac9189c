// Operations that run one after the other on one thread, in the order in which they were started,
// so that callers can wait with a signal handler in between, or not at all.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <thread>

#include "operation.h"

namespace fl {

class Worker {
 public:
  explicit Worker(Transport& transport);
  ~Worker();

  // Run `run` after everything that was submitted before; it throws Failure or Mismatch.
  std::shared_ptr<Operation> submit(double seconds, std::function<void(Operation&)> run);

 private:
  void work();

  Transport& transport_;
  std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
  std::deque<std::shared_ptr<Operation>> pending_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace fl
