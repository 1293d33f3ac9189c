// Operations that run one after the other on one thread, in the order in which they were started,
// so that callers can wait with a signal handler in between, or not at all.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "failure.h"

namespace fl {

using Clock = std::chrono::steady_clock;

// What moves the bytes of a group.
struct Transport {
  virtual ~Transport() = default;
  // Begin an operation: its waits end at `deadline`.
  virtual void begin(Clock::time_point deadline) = 0;
  // From any thread: end the running wait if the deadline has passed.
  virtual void enforce_deadline() = 0;
  // From any thread: end the running wait and all later ones.
  virtual void stop() = 0;
  // What an unexpected error of the running operation means.
  virtual Failure explain(const std::string& what) = 0;
  // Tell every peer why this rank gives up. The group is not used afterwards.
  virtual void give_up(const Failure& failure) noexcept = 0;
};

struct Bytes {
  std::unique_ptr<char[]> data;
  size_t size = 0;
};

// What the worker and the holders of operations share; it outlives the group.
struct Queue {
  std::mutex mutex;
  std::condition_variable work;    // something to do, or time to end
  std::condition_variable done;    // an operation has ended
  Transport* transport = nullptr;  // null once the group is closed
};

struct Operation {
  std::shared_ptr<Queue> queue;
  double seconds = 0;
  std::function<void(Operation&)> run;
  // Results; readable once status is no longer FL_PENDING.
  fl_status status = FL_PENDING;
  std::string message;
  std::vector<int> missing;
  std::vector<fl_signature> signatures;
  Bytes output;
};

class Worker {
 public:
  explicit Worker(Transport& transport);
  ~Worker();

  // Run `run` after everything that was submitted before; it throws Failure or Mismatch.
  std::shared_ptr<Operation> submit(double seconds, std::function<void(Operation&)> run);

 private:
  void work();
  void execute(Operation& operation);
  void finish(Operation& operation, fl_status status, std::string message = {},
              std::vector<int> missing = {});

  Transport& transport_;
  std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
  std::deque<std::shared_ptr<Operation>> pending_;
  bool closing_ = false;
  std::string broken_;  // why the group cannot be used any more
  std::thread thread_;
};

}  // namespace fl
