// Operations: what was started and can be waited for, and how it ends.
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

// Nanoseconds of a clock that all processes of a host share, some milliseconds behind and quick to read.
inline int64_t coarse_now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

// So long after a rank has said that it shuts down, what it has begun before may still arrive: one that has
// waited as long for another message of it, in vain and unmatched until then, ends. It begins those that are
// queued behind others when these have ended.
constexpr std::chrono::milliseconds kLastMessages{500};
constexpr const char* kIsLeaving = "it waits in distributed_shutdown() and has not begun this message";

// No clock comes near it, nor overflows where it is waited for.
constexpr Clock::time_point kNever{std::chrono::hours{1000000}};

// Called now and then while a caller's own thread waits; not 0: give up (a signal handler said so).
using InterruptCheck = int (*)();
constexpr const char* kInterrupted = "a signal handler interrupted the operation";
constexpr const char* kWasClosed = "the group was closed";

// A call as a group is given it: see fl_run.
struct Request {
  fl_signature signature;
  void* data;
  void* output;
  int peer;
  double seconds;
  const fl_site* site = nullptr;  // null: not known
  bool is_ahead = false;
};

// What moves the bytes of a group, and whether it still can.
class Transport {
 public:
  virtual ~Transport() = default;

  // From any thread: end the running waits whose deadline has passed.
  virtual void enforce_deadline() = 0;
  // From any thread: end all running waits and all later ones.
  virtual void stop() = 0;
  // What an unexpected error of a running operation means.
  virtual Failure explain(const std::string& what) = 0;
  // Tell every peer why this rank gives up. fail() calls it, once.
  virtual void give_up(const Failure& failure) noexcept = 0;

  // Of messages, by any thread: why one with `rank` waits in vain, if it does; whether it begins no more, and
  // those that it has begun are here; whether it may have changed or freed what it gave. How to wait.
  virtual std::optional<Failure> loss_of(int) { return std::nullopt; }
  virtual bool has_left(int) { return false; }
  virtual bool has_given_up(int) { return false; }
  virtual Patience patience() const { return {0, 200}; }
  // Whether a wait of that patience has seen what it waited for: the next ones are the less patient.
  virtual void waited(bool /* in_vain */) {}
  // What was found of them, as it is to be said; without a lock, as it may have to be asked for.
  virtual Failure in_full(const Failure& found) { return found; }

  // What users call the ranks of this group, where it is part of a larger one; once, at first.
  void call_ranks(std::vector<int> numbers) { numbers_ = std::move(numbers); }
  std::string name(int rank) const {
    return "rank " + std::to_string(numbers_.empty() ? rank : numbers_[rank]);
  }

  // From any thread: this failure ends the group; the first one counts. Operations that still run,
  // on whatever thread, must end soon, those that come later with FL_CLOSED at once.
  void fail(const Failure& failure) noexcept;
  bool is_broken() const { return is_broken_.load(std::memory_order_relaxed); }
  // Why, and because of whom, as operations that come later are to say it.
  Failure why_broken() const;

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> is_broken_{false};  // why, the mutex guards
  Failure why_{FL_CLOSED, {}, "out of memory"};  // there may be no room for the reason
  std::vector<int> numbers_;
};

struct Bytes {
  std::unique_ptr<char[]> data;
  size_t size = 0;
};

// Room for `size` bytes, not initialised; never a null pointer.
Bytes make_bytes(size_t size);

// What became of a call, where there is more to say than that all went well.
struct Outcome {
  std::string message;
  std::vector<int> missing;
  Seen seen;
  Bytes output;
};

std::unique_ptr<Outcome> outcome_of(const Failure& failure);

// What those who run operations and those who hold them share; it outlives the group.
struct Shared {
  std::mutex mutex;
  std::condition_variable work;    // a thread of the group's has returned from an operation
  std::condition_variable done;    // an operation has ended
  Transport* transport = nullptr;  // null once the group is closed
};

// Where the end of an operation is recorded; see fl_op_stamp.
struct Stamp {
  int64_t* ended = nullptr;
  int64_t running = 0;

  void write() const {
    if (ended != nullptr) fl_stamp(ended, running);
  }
};

struct Operation;

// Who can end an operation on the thread of whoever asks for it.
class Helper {
 public:
  // Do so if nothing has to be waited for; `waits`: the thread is about to.
  virtual void help(const Operation& operation, bool waits) = 0;

 protected:
  ~Helper() = default;
};

struct Operation : Outcome {
  std::shared_ptr<Shared> shared;
  Helper* helper = nullptr;  // of one that no thread has; lives while it is pending and waited for
  double seconds = 0;
  Clock::time_point deadline = Clock::time_point::max();  // of its waits, from when it begins to run
  std::function<void(Operation&)> run;
  // Results; readable once status is no longer FL_PENDING.
  fl_status status = FL_PENDING;
  Clock::time_point ended;
  Stamp stamp;
};

}  // namespace fl

// What callers hold of something that was started; see types.cdef.h.
struct fl_op {
  virtual ~fl_op() = default;
  virtual void release() noexcept { delete this; }
  virtual fl_status wait(double seconds) = 0;
  virtual const fl::Outcome& outcome() const = 0;
  virtual double ended_at() const = 0;  // seconds; 0: it runs
  virtual void stamp(int64_t* ended, int64_t running) = 0;
  virtual void cancel() {}
};

namespace fl {

struct Release {
  void operator()(fl_op* op) const noexcept { op->release(); }
};
// Null: all went well, and there is nothing to fetch.
using Handle = std::unique_ptr<fl_op, Release>;

// A handle of an operation, which goes on without it.
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

// `seconds` from now, or the end of time where that is nearer.
Clock::time_point deadline_after(double seconds);

// Run `operation` on this thread to its end, unless the transport is broken. An exception of it becomes its
// status; anything but Mismatch breaks the transport.
void execute(Transport& transport, Operation& operation) noexcept;

// One that has ended before it began.
std::shared_ptr<Operation> ended_with(fl_status status, Outcome outcome = {});

// End `operation` without running it.
void finish(Operation& operation, fl_status status, const std::string& message = {}, std::vector<int> missing = {});

}  // namespace fl
