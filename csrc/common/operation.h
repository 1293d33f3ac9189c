// Operations: started calls that can be waited for, and their results.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <numeric>
#include <optional>

#include "failure.h"
#include "patience.h"
#include "ticks.h"

namespace fl {

using Clock = std::chrono::steady_clock;

inline std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// Return nanoseconds of a clock that all processes of a host share. It is fast to read, but some ms late.
inline int64_t coarse_now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

// Maximum pause between two messages of a rank that has begun its shutdown. Messages that it began earlier
// may still arrive, and after each of them it may begin a queued one. After a longer pause, other ranks'
// waits for its messages fail. Otherwise all would wait until the timeout: the rank waits for all ranks.
constexpr std::chrono::milliseconds kLastMessages{500};
constexpr const char* kIsLeaving = "it waits in distributed_shutdown() and has not begun this message";

// A time point that is never reached and does not overflow in waits.
constexpr Clock::time_point kNever{std::chrono::hours{1000000}};

// Called regularly while a caller's thread waits. Nonzero: a signal handler has raised, and the wait ends.
using InterruptCheck = int (*)();
constexpr const char* kInterrupted = "a signal handler interrupted the operation";
constexpr const char* kWasClosed = "the group was closed";

// The arguments of a call: see fl_run.
struct Request {
  fl_signature signature;
  void* data;
  void* output;
  int peer;
  double seconds;
  const fl_site* site = nullptr;  // null: unknown
  bool is_ahead = false;
};

// The transport of a group, and whether the group is usable.
class Transport {
 public:
  virtual ~Transport() = default;

  // End all waits of running operations, and each wait that starts later. Any thread may call it.
  virtual void stop() = 0;
  // Return the failure of an operation that threw an unexpected exception with the text `what`.
  virtual Failure explain(const std::string& what) = 0;
  // Send every peer `failure`, the reason why this rank gives up. Transport::fail() calls it once.
  virtual void give_up(const Failure& failure) noexcept = 0;

  // Used by sends and receives, on any thread. loss_of(): return why a wait for a rank must fail, or nothing.
  virtual std::optional<Failure> loss_of(int) { return std::nullopt; }
  virtual bool has_left(int) { return false; }      // the rank's last message has arrived
  virtual bool has_given_up(int) { return false; }  // the rank may have changed or freed its data
  virtual Patience patience() const { return {0, 200}; }
  // Report a polling wait. `in_vain`: no data arrived meanwhile. Later waits then poll for a shorter time.
  virtual void waited(bool /* in_vain */) {}
  // Return `found` with its details. Call it without a lock, because it may wait for other ranks.
  virtual Failure with_details(const Failure& found) { return found; }

  // Set the user-visible numbers of the ranks of a subgroup. Call it once, before the first operation.
  void call_ranks(std::vector<int> numbers) { numbers_ = std::move(numbers); }
  std::string name(int rank) const {
    return "rank " + std::to_string(numbers_.empty() ? rank : numbers_[rank]);
  }

  // End the group with this failure; only the first failure counts. Any thread may call it. Running
  // operations must then end soon, on any thread. Later operations end immediately with FL_CLOSED.
  void fail(const Failure& failure) noexcept;
  bool is_broken() const { return is_broken_.load(std::memory_order_relaxed); }
  // Return the failure that later operations report.
  Failure why_broken() const;

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> is_broken_{false};           // the mutex guards why_
  Failure why_{FL_CLOSED, {}, "out of memory"};  // initial text, kept if the reason cannot be stored
  std::vector<int> numbers_;
};

struct Bytes {
  std::unique_ptr<char[]> data;
  size_t size = 0;
};

// Return `size` uninitialised bytes. The pointer is never null.
Bytes make_bytes(size_t size);

// Result of a call except its status: details of a failure, and received data.
struct Outcome {
  std::string message;
  std::vector<int> missing;
  CallReport report;
  Bytes output;
};

std::unique_ptr<Outcome> outcome_of(const Failure& failure);

// State that the handles share with the threads that run operations. It may outlive the group.
struct Shared {
  std::mutex mutex;
  std::condition_variable work;  // notified when a thread of the group returns from an operation
  std::condition_variable done;  // notified when an operation has ended
};

// Address at which an operation stores its end time; see fl_op_stamp.
struct Stamp {
  int64_t* ended = nullptr;
  int64_t running = 0;

  void write() const { if (ended != nullptr) fl_stamp(ended, running); }
};

struct Operation : Outcome {
  std::shared_ptr<Shared> shared;
  // For an operation without a thread: complete it on the thread of a caller that polls or waits, if this does
  // not block. `waits`: whether the caller will then wait. Valid while the operation is pending.
  std::function<void(const Operation& operation, bool waits)> help;
  double seconds = 0;
  Clock::time_point deadline = Clock::time_point::max();  // end of its waits, set when it begins to run
  std::function<void(Operation&)> run;
  // The following results are readable if `status` is not FL_PENDING.
  fl_status status = FL_PENDING;
  Clock::time_point ended;
  Stamp stamp;
};

}  // namespace fl

// Handle of a started operation; see types.cdef.h.
struct fl_op {
  virtual ~fl_op() = default;
  virtual void release() noexcept { delete this; }
  virtual fl_status wait(double seconds) = 0;
  virtual const fl::Outcome& outcome() const = 0;
  virtual double ended_at() const = 0;  // seconds; 0: still running
  virtual void stamp(int64_t* ended, int64_t running) = 0;
  virtual void cancel() {}
};

namespace fl {

struct Release {
  void operator()(fl_op* op) const noexcept { op->release(); }
};
// Null: success without a result to fetch.
using Handle = std::unique_ptr<fl_op, Release>;

// Handle of an Operation. The operation continues if the handle is freed.
class Started : public fl_op {
 public:
  explicit Started(std::shared_ptr<Operation> operation) : operation_(std::move(operation)) {}
  fl_status wait(double seconds) override;
  const Outcome& outcome() const override { return *operation_; }
  double ended_at() const override;
  void stamp(int64_t* ended, int64_t running) override;

 private:
  const std::shared_ptr<Operation> operation_;
};

inline Handle handle_of(std::shared_ptr<Operation> operation) {
  return Handle(operation == nullptr ? nullptr : new Started(std::move(operation)));
}

// Return the time `seconds` from now, capped at 1e9 seconds.
Clock::time_point deadline_after(double seconds);

// Run `operation` to its end on this thread, or fail it if the transport is broken. An exception becomes its
// status. Any exception except Mismatch breaks the transport.
void execute(Transport& transport, Operation& operation) noexcept;

// Return an operation that has already ended, with `status` and `outcome`.
std::shared_ptr<Operation> ended_with(fl_status status, Outcome outcome = {});

// End `operation` without running it.
void finish(Operation& operation, fl_status status, const std::string& message = {}, std::vector<int> missing = {});

}  // namespace fl
